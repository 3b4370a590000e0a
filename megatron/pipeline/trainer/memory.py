"""The memory that a training needs, before any of it is taken."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import torch

from megatron.pipeline import planning
from megatron.pipeline.costmodel.memory import GIB, RankMemory, predict
from megatron.pipeline.dist.device import device_memory, this_device
from megatron.pipeline.flags.config import microbatch_counts
from megatron.pipeline.model.layout import decoder_layers
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.schedule.core.schedule import Schedule


def largest_iteration(args: Namespace, pipeline: Pipeline) -> Schedule:
    """The schedule of the most microbatches; where it is megatron-core's own, as our families have it."""
    microbatches, placement = max(microbatch_counts(args)), pipeline.placement
    if pipeline.is_stock:
        name, group = ("interleaved", args.microbatch_group_size_per_vp_stage) if placement.chunks > 1 else ("1f1b", None)
        return planning.plan(name, placement.ranks, microbatches, chunks=placement.chunks, group=group)
    return pipeline.plan(microbatches).schedule


def predicted_memory(args: Namespace, pipeline: Pipeline) -> list[RankMemory]:
    """What every pipeline rank needs; on a machine without a GPU no library keeps workspaces."""
    ranks = predict(args, largest_iteration(args, pipeline), decoder_layers(args, pipeline.placement))
    return ranks if torch.cuda.is_available() else [replace(rank, workspaces=0.0) for rank in ranks]


def check_rehearsal_fits(args: Namespace, pipeline: Pipeline, world_size: int) -> None:
    """Refuse a rehearsal whose ranks need more memory than the devices that they share have, all of them together.

    With ``--rehearse-park`` a GPU has the activations of all ranks and the state of one.

    Raises:
        ValueError: how much is missing, and what to change.
    """
    if not args.rehearse:
        return
    ranks = predicted_memory(args, pipeline)
    state = [rank.allocated - rank.activations for rank in ranks]
    if torch.cuda.is_available():
        devices, what, together = torch.cuda.device_count(), "a GPU", max(state) if args.rehearse_park else sum(state)
    else:
        devices, what, together = 1, "this machine", sum(state)
    memory = device_memory(this_device())
    needed = (sum(rank.activations for rank in ranks) + together) * (world_size // len(ranks)) / devices
    if needed > memory:
        parks = torch.cuda.is_available() and not args.rehearse_park
        park = "add --rehearse-park, which has one rank's state there at a time, or " if parks else ""
        raise ValueError(
            f"--rehearse has all {world_size} ranks on one machine, where their weights, gradients, optimizer states and "
            f"activations take about {needed / GIB:.4g} GiB of {what}, which has {memory / GIB:.4g} GiB, "
            f"{(needed - memory) / GIB:.4g} GiB less: {park}rehearse fewer --num-layers or a smaller --micro-batch-size"
        )
