"""The memory that a training needs, before any of it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron.pipeline.distributed.device import device_memory, this_device
from megatron.pipeline.flags.config import microbatch_counts
from megatron.pipeline.flags.flags import STOCK_1F1B, neutral
from megatron.pipeline.flags.settings import Role, Settings
from megatron.pipeline.model.description import describe
from megatron.pipeline.model.layout import decoder_layers
from megatron.pipeline.planner import (
    STOCK,
    Beside,
    Costs,
    Placement,
    Request,
    Schedule,
    StageCosts,
    Vocabulary,
    interleaved,
    rank_memory,
)
from megatron.pipeline.runtime.pipeline import Pipeline

_NEAR = 1.001  # times what stock needs: predictions are no better


def largest_iteration(args: Settings, pipeline: Pipeline) -> Schedule:
    """The schedule of the most microbatches; where it is megatron-core's own, as our families have it."""
    microbatches, placement = max(microbatch_counts(args)), pipeline.placement
    if pipeline.is_stock:
        name, group = ("interleaved", args.microbatch_group_size_per_vp_stage) if placement.chunks > 1 else ("1f1b", None)
        return Request(name, placement.ranks, microbatches, chunks=placement.chunks, group=group).plan().schedule
    return pipeline.plans.plan(microbatches).schedule


def predicted_memory(args: Settings, pipeline: Pipeline) -> list[rank_memory.RankMemory]:
    """Memory that every pipeline rank needs on this machine."""
    return _here(rank_memory.predict(describe(args), largest_iteration(args, pipeline), decoder_layers(args, pipeline.placement)))


def stock_memory(args: Settings) -> list[rank_memory.RankMemory] | None:
    """Memory that every pipeline rank needs under megatron-core's own 1F1B; None where the model cannot be cut for it."""
    stock, ranks = args | STOCK_1F1B, args.pipeline_model_parallel_size
    try:
        layers = decoder_layers(stock, interleaved(ranks, 1))
    except ValueError:
        return None
    schedule = Request("1f1b", ranks, min(ranks, max(microbatch_counts(args)))).plan().schedule
    return _here(rank_memory.predict(describe(stock), schedule, layers))


def _here(ranks: list[rank_memory.RankMemory]) -> list[rank_memory.RankMemory]:
    """On a machine without a GPU no library keeps workspaces."""
    return ranks if torch.cuda.is_available() else [replace(rank, workspaces=0.0) for rank in ranks]


def more_than_stock(
    args: Settings, ranks: Sequence[rank_memory.RankMemory], stock: Sequence[rank_memory.RankMemory] | None
) -> str | None:
    """The warning where a rank is predicted to need more than the fullest one under megatron-core's own 1F1B, else None.

    Args:
        ranks, stock: what every rank needs, and what it would under 1F1B.
    """
    if stock is None or args.pipeline.schedule == STOCK:
        return None
    fullest, most = (max(each, key=lambda rank: rank.total) for each in (ranks, stock))
    if fullest.allocated <= most.allocated * _NEAR:
        return None
    ours, theirs = (" ".join(f"{rank.total / rank_memory.GIB:.3g}" for rank in each) for each in (ranks, stock))
    again = args.recompute_granularity == "full" and not describe(args).makes_weights_again
    remedies = [f"--vocab-parallel {'off' if args.vocabulary.spread else 2}"] + ["--recompute-fused-backward"] * again
    remedies.append("a lower --pipeline-memory-limit under zb-h1, zb-auto or v-auto")
    return (
        f"WARNING: pipeline rank {list(ranks).index(fullest)} is predicted to need {fullest.total / rank_memory.GIB:.3g} GiB, "
        f"{(fullest.total - most.total) / rank_memory.GIB:.3g} GiB more than the fullest rank under 1F1B "
        f"(stock); by rank, GiB: {ours}; "
        f"stock: {theirs}; what takes less: {', or '.join(remedies)}"
    )


def equal_stages(args: Settings, share: StageCosts, placement: Placement, vocabulary: Vocabulary | None) -> Sequence[StageCosts]:
    """Costs of passes before they are measured: equal times of what trains, and memory as the formulas have it, if these know it.

    A microbatch of a rank's mean share of the layers holds 1, until W; what the output layer holds comes on top.

    Args:
        share: of a rank, where all are equal.
    """
    stage = share.share(placement.chunks)
    sizes = _sizes(args, placement, vocabulary)
    if sizes is None or sizes.grows:
        return (stage,) * (placement.last_stage + 1)
    unit = sum(sizes.layers) / placement.ranks or 1.0
    return tuple(
        replace(
            stage,
            backward=backward * stage.backward,
            weight=weight * stage.weight,
            activation=(layers + output) / unit,
            retained=(layers * share.retained + retained) / unit,
        )
        for layers, output, retained, (backward, weight) in zip(
            sizes.layers, sizes.output, sizes.retained, sizes.trained, strict=True
        )
    )


def beside(args: Settings, placement: Placement, vocabulary: Vocabulary | None, in_bytes: bool = False) -> Beside | None:
    """Memory that ranks need beside activations, under 1F1B and on a placement, by the formulas; None where they do not know.

    Args:
        in_bytes: in place of the unit of ``equal_stages``.
    """
    sizes = _sizes(args, placement, vocabulary)
    first = interleaved(placement.ranks, 1)
    stock = args | neutral(Role.CHUNKS) | {"vocab_parallel": None}
    of_stock = _sizes(stock, first, None)
    if sizes is None or of_stock is None or (sizes.grows and not in_bytes):
        return None
    unit = 1.0 if in_bytes else sum(sizes.layers) / placement.ranks or 1.0
    return Beside(_beside(stock, first, None, of_stock, unit), _beside(args, placement, vocabulary, sizes, unit))


def _beside(
    args: Settings, placement: Placement, vocabulary: Vocabulary | None, sizes: rank_memory.StageSizes, unit: float
) -> tuple[float, ...]:
    fixed = rank_memory.fixed_memory(describe(args), placement, decoder_layers(args, placement), vocabulary)
    making = [max(sizes.making[stage] for stage in stages) for stages in placement.stages]
    return tuple((each.state + each.temporary + more) / unit for each, more in zip(fixed, making, strict=True))


def _sizes(args: Settings, placement: Placement, vocabulary: Vocabulary | None) -> rank_memory.StageSizes | None:
    """None where the formulas are not for the model, or it cannot be cut so."""
    if not knows_sizes(args):
        return None
    try:
        return rank_memory.stage_sizes(describe(args), decoder_layers(args, placement), vocabulary is not None)
    except ValueError:
        return None


def knows_sizes(args: Settings) -> bool:
    """Tell whether the formulas hold: a script of the user's may have no tokenizer, and they know no FP8."""
    return bool(getattr(args, "padded_vocab_size", None)) and not getattr(args, "fp8", None)


def uncounted_sizes(args: Settings, pipeline: Pipeline) -> Costs | None:
    """Costs with the bytes of a training in FP8, whose tensors cannot be counted: the formulas', which are for 16 bits, about as
    much as FP8's two copies, by rows and by columns, take. None of a training in 16 or 32 bits.

    Raises:
        ValueError: the size of the vocabulary is unknown.
    """
    if not getattr(args, "fp8", None):
        return None
    if not getattr(args, "padded_vocab_size", None):
        raise ValueError(
            "--pipeline-costs profile in FP8 takes bytes from formulas, which need the size of the vocabulary: give --vocab-size "
            "N, or --pipeline-costs FILE"
        )
    return rank_memory.costs_in_bytes(
        describe(args), pipeline.placement, decoder_layers(args, pipeline.placement), pipeline.plans.vocabulary
    )


def check_rehearsal_fits(args: Settings, pipeline: Pipeline, world_size: int) -> None:
    """Refuse a rehearsal whose ranks need more memory than the devices that they share have, all of them together.

    Raises:
        ValueError: how much is missing, and what to change.
    """
    if not args.rehearsal.on:
        return
    ranks = predicted_memory(args, pipeline)
    devices, what = (torch.cuda.device_count(), "a GPU") if torch.cuda.is_available() else (1, "this machine")
    memory = device_memory(this_device())
    needed = sum(rank.allocated for rank in ranks) * (world_size // len(ranks)) / devices
    if needed > memory:
        raise ValueError(
            f"--rehearse has all {world_size} ranks on one machine, where their weights, gradients, optimizer states and "
            f"activations take about {needed / rank_memory.GIB:.4g} GiB of {what}, which has {memory / rank_memory.GIB:.4g} GiB, "
            f"{(needed - memory) / rank_memory.GIB:.4g} GiB less: rehearse fewer --num-layers or a smaller --micro-batch-size"
        )
