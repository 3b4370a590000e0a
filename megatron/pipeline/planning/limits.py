"""How much memory a rank may hold: what the user allows, what a family's name stands for, and what a spread vocabulary adds."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import Vocabulary
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.problem import LimitTooLow, Problem
from megatron.pipeline.schedule.families import Family
from megatron.pipeline.schedule.rules.verify import per_rank, rounded_up
from megatron.pipeline.schedule.transforms.vocabulary import MOST_WAITING, postponed


def kept_limits(
    family: Family | None,
    placement: Placement,
    costs: Costs,
    given: float | Sequence[float] | None = None,
    vocabulary: Vocabulary | None = None,
) -> tuple[float, ...] | None:
    """What each rank may hold, in the costs' unit, from the user's limit and the amount that the family's name stands for.

    Args:
        family: None for a schedule that any limit may be set for.

    Raises:
        LimitTooLow: the user's limit is below an amount that the family cannot do without.
    """
    limits = None if given is None else tuple(per_rank(given, placement.ranks))
    if family is None or family.memory is None:
        return limits
    bare = Problem(placement, 1, costs)
    microbatch = max(map(bare.microbatch_memory, range(placement.ranks)))
    count, more = family.memory(placement.ranks), memory_of_spreading(vocabulary, placement, costs)
    own = (count * microbatch + more,) * placement.ranks
    if limits is None:
        return own
    if not family.plans_for_limits and min(limits) < own[0] * (1 - 1e-9):
        raise LimitTooLow(
            f"{family.name} on {placement.ranks} ranks is the schedule with room for {count:g} microbatches, {own[0]:g} on every "
            f"rank, and the limit is {min(limits):g}: give at least {rounded_up(own[0])}, or take v-auto, which plans for any "
            f"limit from {rounded_up(microbatch + more)} up",
            own[0],
        )
    return own if family.memory_is == "fixed" else limits


def memory_of_spreading(vocabulary: Vocabulary | None, placement: Placement, costs: Costs) -> float:
    """What a rank may hold more where the vocabulary is spread, in the costs' unit."""
    if vocabulary is None:
        return 0.0
    return postponed(vocabulary, placement.ranks) * largest_microbatch(placement, costs) + logits(costs)


def largest_microbatch(placement: Placement, costs: Costs) -> float:
    """The most that a rank can hold of one microbatch's stages."""
    return max(stage.activation for stage in costs.stages) * placement.chunks


def logits(costs: Costs) -> float:
    """What a rank holds for its shard of the vocabulary: while one S runs, ``MOST_WAITING`` others wait for their T."""
    return (MOST_WAITING + 1) * costs.vocabulary.activation
