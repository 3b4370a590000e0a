"""The distributed optimizer around torch's Adam, loaded as Megatron-LM does. For padding see test_checkpoint_layouts.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from training.short_runs import MODEL


def saved_and_loaded(flags: str, kind: str, directory: str) -> list[list[tuple[float, list[float]]]]:
    """What an optimizer saves after two steps, and what another loads before its first: steps and moments by parameter."""
    from megatron.pipeline import patches

    patches.install()
    import torch
    from megatron.core import dist_checkpointing, parallel_state

    from megatron.pipeline.trainer import program
    from megatron.pipeline.trainer.state import build_training

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
