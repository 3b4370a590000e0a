"""Gradients of a training by global names, for ``mpipe check``: whole weights, however ranks have cut them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from megatron.pipeline.trainer import checkpoint
from megatron.pipeline.trainer.gradient_files import Weight, WeightPart, read, write
from megatron.pipeline.trainer.state import Training


def watching(folder: Path, start: Path | None, tell: Callable[[str], object]) -> Callable[[Training], None]:
    """A function for ``program.run`` to call: from then on every iteration's gradients are written when all ranks' are added up.

    Args:
        folder: for ``gradient_files``; as those of iteration 0 it gets the weights at the start.
        start: another training's folder, with whose weights this one starts; None for its own.
        tell: called with what this rank is at.
    """

    def note(training: Training, iteration: int) -> None:
        tell(f"iteration {iteration}")
        parts = [WeightPart.of(one) for one in _tensors(training) if is_main_replica(one.replica_id)]
        write(folder, iteration, torch.distributed.get_rank(), parts)

    def watch(training: Training) -> None:
        if start is not None:
            _load(training, start)
        note(training, 0)
        finalize: Any = training.config.finalize_model_grads_func

        def finalized(*arguments: Any, **more: Any) -> None:
            finalize(*arguments, **more)
            with _gradients_as_weights(training):
                note(training, training.iteration + 1)

        training.config.finalize_model_grads_func = finalized

    return watch


def _tensors(training: Training) -> list[ShardedTensor]:
    """This rank's part of each weight, as for a checkpoint."""
    states = {name.rpartition(".")[2] for chunk in training.chunks for name, _ in chunk.named_buffers()}
    state = checkpoint.training_state(training, with_optimizer=False, is_loading=False)
    apply_factories(state)
    found = [one for one in nested_values(state) if isinstance(one, ShardedTensor)]
    return [one for one in found if one.key.rpartition(".")[2] not in states]


def _load(training: Training, start: Path) -> None:
    """Give this rank's weights the values that another training started with."""
    wholes = read(start, 0)
    for one in _tensors(training):
        part = WeightPart.of(one)
        assert one.data is not None
        one.data.detach().copy_(wholes[Weight.of(part)][0][part.place])
    training.optimizer.reload_model_params()


@contextmanager
def _gradients_as_weights(training: Training) -> Iterator[None]:
    """Within, weights have the values of their gradients; those of other replicas are fetched to a distributed optimizer."""
    for chunk in training.chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            _fetch_reduced(chunk)
    weights: list[Any] = [weight for chunk in training.chunks for weight in chunk.parameters() if weight.requires_grad]
    kept = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.main_grad
    try:
        yield
    finally:
        for weight, data in zip(weights, kept, strict=True):
            weight.data = data


def _fetch_reduced(chunk: Any) -> None:
    """Fetch what other replicas' ranks have of the sums: each has reduced a part of every bucket."""
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            mine = bucket.grad_data.view(ranks.size(), -1)[ranks.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, mine, group=ranks)
