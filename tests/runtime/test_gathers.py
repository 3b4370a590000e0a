"""Weights that are gathered behind each bucket's step are those of one step and gather, in a loop that does more than train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from example_runs import example
from marked import rest
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from pool import Pool

from megatron.pipeline import install


def train(
    schedule: str, overlap: bool, trains: str, bucket: int, clip: float, instances: int = 1
) -> tuple[list[Any], list[torch.Tensor], int]:
    """Losses, norms and saved weights on the way; the weights at the end; and how many gathers have begun with steps.

    The loop evaluates, skips a step, saves, and has a learning rate for each group of parameters.

    Args:
        trains: part of the names of weights that are not frozen; "first" for none in a rank's last chunk, "ranks" for none on
            the first pipeline rank.
        bucket: size, in weights.
        instances: of the distributed optimizer, each of which has all of a chunk's optimizer state.
    """
    own = example("own_training_loop")
    chunks = install(schedule).pipeline(2).placement.chunks
    several = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(1, 2, several, num_distributed_optimizer_instances=instances)
    own.tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    models = own.build(share_embeddings_and_output_weights=False)
    for number, model in enumerate(models):
        for name, weight in model.named_parameters():
            frozen = {
                "": False,
                "first": number == chunks - 1 and chunks > 1,
                "ranks": parallel_state.get_pipeline_model_parallel_rank() == 0,
            }
            weight.requires_grad_(not frozen.get(trains, trains not in name))
    distributed = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": overlap}
    wrapped = own.wrap(models, **distributed, bucket_size=bucket, num_distributed_optimizer_instances=instances)
    settings = {"use_distributed_optimizer": True, "overlap_param_gather": overlap, "weight_decay": 0.1, "clip_grad": clip}
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, **settings), wrapped)
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 1e-2 / (1 + 2 * number)
    seen: list[Any] = []
    early = 0

    def call(seed: int, forward_only: bool = False) -> None:
        data = own.batches(4, seed=2 * seed + parallel_state.get_data_parallel_rank())
        reports = get_forward_backward_func()(
            forward_step_func=own.forward_step,
            data_iterator=[iter(data) for _ in wrapped],
            model=wrapped,
            num_microbatches=len(data),
            seq_length=own.LENGTH,
            micro_batch_size=own.BATCH,
            forward_only=forward_only,
        )
        seen.append([float(one.mean()) for one in reports])

    for iteration in range(5):
        optimizer.zero_grad()
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        call(iteration)
        if iteration != 1:
            seen.append(float(optimizer.step()[1]))
            early += sum(group.param_gather_handle is not None for chunk in wrapped for group in chunk.bucket_groups)
        if iteration in (0, 1, 3):
            call(100 + iteration, forward_only=True)
        if iteration in (2, 3):
            for chunk in wrapped:
                chunk.start_param_sync(force_sync=True)
            seen.append(
                [float(weight.double().sum()) for model in models for weight in model.state_dict().values() if weight is not None]
            )
    for chunk in wrapped:
        chunk.start_param_sync(force_sync=True)
    return seen, [weight.detach().clone() for model in models for weight in model.parameters()], early


@pytest.mark.parametrize(
    ("schedule", "trains", "bucket", "clip", "instances", "ranks"),
    [
        ("zb-v", "", 4096, 0.05, 2, 4),
        rest("zb-v", "", 4096, 0.05, 2, 8),  # each of two replicas
        rest("zb-v", "", 1, 0.0, 1, 4),  # a bucket for each weight, and shards of nothing
        rest("zb-v", "linear_qkv", 4096, 0.05, 1, 4),
        rest("zb-v", "first", 4096, 0.05, 1, 4),
        rest("zb-v", "ranks", 4096, 0.05, 1, 4),
        rest("zb-h1", "final_layernorm", 4096, 0.05, 1, 4),  # one rank alone has a weight to train
    ],
)
def test_an_own_loop(pool: Pool, schedule: str, trains: str, bucket: int, clip: float, instances: int, ranks: int) -> None:
    """PP 2; with one instance of the distributed optimizer and with two, which add gradients up on a stream of their own."""
    options = trains, bucket, clip, instances
    behind, at_once = (pool.run(ranks, train, schedule, overlap, *options, timeout=200) for overlap in (True, False))
    for (seen, weights, _), (expected, stepped, none) in zip(behind, at_once, strict=True):
        assert seen == expected and not none
        assert all(torch.equal(*pair) for pair in zip(weights, stepped, strict=True))
    assert any(early for *_, early in behind)
