"""The distributed optimizer around torch's Adam, loaded as Megatron-LM does. For padding see test_checkpoint_layouts.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.pipeline.patches import distrib_optimizer
from pool import Pool
from training.short_runs import MODEL

from megatron.pipeline.trainer import program
from megatron.pipeline.trainer.state import build_training


def saved_and_loaded(flags: str, kind: str, directory: str) -> list[list[tuple[float, list[float]]]]:
    """What an optimizer saves after two steps, and what another loads before its first: steps and moments by parameter."""
    metadata = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True, "singleton_local_shards": False}

    def state_of(training: Any, is_loading: bool) -> dict[str, Any]:
        [chunk] = training.chunks
        model = chunk.module.sharded_state_dict(metadata=metadata)
        optimizer = training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def numbers(training: Any) -> list[tuple[float, list[float]]]:
        states = training.optimizer.chained_optimizers[0].optimizer.state.values()
        assert len({id(state["step"]) for state in states}) == len(states), "one counter for several parameters"
        return [(float(state["step"]), state["exp_avg"].tolist()) for state in states]

    args, _, pipeline = program.prepare(f"{MODEL} {flags}".split(), torch.distributed.get_world_size())
    with program._megatron_state(args, pipeline.placement):
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        trained, new = (build_training(args, pipeline.placement) for _ in range(2))
        for factor in (1, -2):
            for parameter in trained.chunks[0].parameters():
                parameter.main_grad.copy_(factor * torch.arange(parameter.numel()).view_as(parameter) / parameter.numel())
            trained.optimizer.step()
        if torch.distributed.get_rank() == 0:
            Path(directory).mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save(state_of(trained, is_loading=False), directory)
        found = dist_checkpointing.load(state_of(new, is_loading=True), directory)
        new.chunks[0].module.load_state_dict(found["model"])
        new.optimizer.load_state_dict(found["optimizer"])
        return [numbers(trained), numbers(new)]


@pytest.mark.parametrize("kind", ["fully_reshardable", "dp_reshardable"])
def test_torchs_optimizer_is_loaded_before_its_first_step(pool: Pool, data: str, tmp_path: Path, kind: str) -> None:
    flags = f"{data} --num-layers 2 --use-distributed-optimizer"
    for saved, loaded in pool.run(2, saved_and_loaded, flags, kind, str(tmp_path / "saved")):
        assert saved == loaded
        assert {steps for steps, _ in loaded} == {2.0}


def stepped_by_bucket(flags: str, counts_empty: bool) -> tuple[list[str], list[int], bool]:
    """Two steps of two equal models, one bucket by bucket: what happened in the second, steps counted by groups, equality."""
    happened: list[str] = []

    class Counting:
        """Counts steps as apex's and Transformer Engine's optimizers do: for a group. Later steps are longer."""

        def __init__(self, param_groups: list[dict[str, Any]]) -> None:
            self.param_groups = param_groups

        @torch.no_grad()
        def step(self) -> None:
            happened.append("step")
            for group in self.param_groups:
                if group["params"] or counts_empty:
                    group["step"] = group["step"] + 1 if "step" in group else 1
                for parameter in group["params"]:
                    parameter.sub_(1e-3 * group["step"] * parameter.grad)

    args, _, pipeline = program.prepare(f"{MODEL} {flags}".split(), torch.distributed.get_world_size())
    with program._megatron_state(args, pipeline.placement):
        by_bucket, at_once = (build_training(args, pipeline.placement) for _ in range(2))
        order = [group for chunk in by_bucket.chunks for group in distrib_optimizer.gathered(chunk)]

        def noted(number: int, start: Any, **force: bool) -> None:
            happened.append(f"gather {number}")
            start(**force)

        for number, group in enumerate(order):
            group.start_param_sync = partial(noted, number, group.start_param_sync)
        counts = []
        for training in (by_bucket, at_once):
            [part] = training.optimizer.chained_optimizers
            for chunk in training.chunks if training is at_once else ():
                chunk.disable_forward_pre_hook(param_sync=False)
            part.optimizer = Counting(part.optimizer.param_groups)
            for factor in (1, -2):
                happened[:] = happened if training is at_once else []
                for chunk in training.chunks:
                    for group in chunk.bucket_groups:
                        group.param_gather_dispatched = False  # as after a reduction
                    for parameter in chunk.parameters():
                        parameter.main_grad.copy_(factor * torch.arange(parameter.numel()).view_as(parameter) / parameter.numel())
                assert training.optimizer.step()[0]
            counts += [group["step"] for group in part.optimizer.param_groups]
        events = list(happened)
        for chunk in (*by_bucket.chunks, *at_once.chunks):
            chunk.start_param_sync(force_sync=True)
        pairs = zip(by_bucket.chunks, at_once.chunks, strict=True)
        equal = all(
            torch.equal(one, other) for pair in pairs for one, other in zip(*(chunk.parameters() for chunk in pair), strict=True)
        )
    return events, counts, equal


@pytest.mark.parametrize(("flags", "counts_empty"), [("", False), ("--bf16", True)])
def test_each_bucket_is_gathered_behind_its_own_step(pool: Pool, data: str, flags: str, counts_empty: bool) -> None:
    """In the order of forwards, with the numbers of one step of all; optimizers may count a group of no weights, too."""
    layout = "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --use-distributed-optimizer"
    overlaps = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 10000"
    for happened, counts, equal in pool.run(4, stepped_by_bucket, f"{data} {layout} {overlaps} {flags}", counts_empty):
        buckets = (len(happened) - 2) // 2  # both steps of the other model come last
        assert buckets > 2
        assert happened[:-2] == [event for bucket in range(buckets) for event in ("step", f"gather {bucket}")]
        assert set(counts) == {2}
        assert equal
