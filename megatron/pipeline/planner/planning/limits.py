"""Memory limits of each rank: 1F1B's peak, the unit of amounts of memory, and the limits of families that stand for an amount.

Stages differ: the last one holds the logits of each microbatch too. What matters is whether a training that fits under 1F1B
fits under another schedule, so that every rank may hold as much as the fullest one of 1F1B does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.cutting import with_whole_vocabulary
from megatron.pipeline.planner.schedule.core.kinds import MOST_WAITING
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.slack import SLACK, within
from megatron.pipeline.planner.schedule.families import Family
from megatron.pipeline.planner.schedule.rules.verify import rounded_up
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks
from megatron.pipeline.planner.schedule.transforms.transform import fuse, recompute
from megatron.pipeline.planner.schedule.transforms.vocabulary import postponed

_GIVEN_UP = 0.5  # of its memory that a family does without at most where weights take more than under 1F1B: less makes it slow


@dataclass(frozen=True)
class Beside:
    """Memory that every rank needs beside activations, such as weights and optimizer states, in the costs' unit of memory.

    Attributes:
        stock: under megatron-core's 1F1B.
        own: on the placement that is planned for.
    """

    stock: tuple[float, ...]
    own: tuple[float, ...]


@lru_cache(maxsize=64)
def peaks_of_1f1b(costs: Costs, ranks: int, microbatches: int) -> tuple[float, ...]:
    """The most that every rank holds under megatron-core's 1F1B, with the vocabulary at the ends of the model.

    Args:
        costs: of any number of stages, in the model's order; of these the first and the last get a vocabulary that is spread.
    """
    costs = cutting.of_depth(with_whole_vocabulary(costs, ranks), ranks)
    placement = families.placement("1f1b", ranks)
    fills = Problem(placement, microbatches, costs).first(ranks)  # rank r never holds more than p-r of them
    return tuple(activation_peaks(of_stages("1f1b", fills), costs))


def peak_of_1f1b(costs: Costs, ranks: int, microbatches: int) -> float:
    """The most that a rank holds under 1F1B: the unit of limits such as 0.5, and of what schedules are said to hold."""
    return max(peaks_of_1f1b(costs, ranks, microbatches))


def of_stages(name: str, problem: Problem) -> Schedule:
    """The family's order of the stages' passes."""
    schedule = Schedule(name, problem.placement, problem.microbatches, families.named(name).plan(problem), problem.splits)
    return recompute(fuse(schedule, problem.fused), problem.recompute)


def kept_limits(family: Family, problem: Problem, beside: Beside | None = None) -> tuple[float, ...] | None:
    """Memory limit of each rank, in the costs' unit, from the problem's limits and the amount that the family's name stands for.

    Args:
        beside: what ranks need beside activations, where that is known. Without limits of the problem no rank then needs more in
            all than the fullest one under 1F1B, unless the family cannot do without, or would be slow.

    Raises:
        LimitTooLow: the problem's limits are below an amount that the family cannot do without.
    """
    given = problem.limits
    if (family.memory or family.keeps) is None or (given is not None and (family.keeps or family.plans_for_limits)):
        return given
    own = _own_limits(family, problem, beside)
    if family.keeps:
        enough = problem.first(4 * problem.ranks)
        whole = activation_peaks(of_stages(family.name, enough), problem.costs)
        return None if within((peak + spreading(problem) for peak in whole), own) else own
    if given is None:
        return own
    assert family.memory is not None
    if any(limit < needed / (1 + SLACK) for limit, needed in zip(given, own, strict=True)):
        least, count = max(own), family.memory(problem.ranks)
        raise LimitTooLow(
            f"{family.name} on {problem.ranks} ranks is the schedule with room for {count:g} microbatches, "
            f"{least:g} on every rank, and the limit is {min(given):g}: give at least {rounded_up(least)}, or take v-auto, which "
            f"plans for any limit from {rounded_up(max(least_limits(family, problem)))} up",
            least,
        )
    return own if family.memory_is == "fixed" else given


def _own_limits(family: Family, problem: Problem, beside: Beside | None) -> tuple[float, ...]:
    """The limits that the family's name stands for."""
    ranks, amount = problem.ranks, family.memory or family.keeps
    assert amount is not None
    peaks = peaks_of_1f1b(problem.costs, ranks, problem.microbatches)
    if problem.costs.loads:
        full = max(peaks) * max(1.0, ranks / problem.microbatches)  # as if more were like these
    else:
        full = max(peaks_of_1f1b(problem.costs, ranks, ranks))
    stages = problem.costs.stages
    if problem.limits is None and problem.placement.chunks > 1 and not all(stage.activation for stage in stages):
        # 1F1B's first ranks, which hold most microbatches, have the frozen stages; of these a rank of a V may have none.
        most = max(sum(stages[stage].activation for stage in row) for row in problem.placement.stages)
        peaks = tuple(max(peak, min(ranks, problem.microbatches) * most) for peak in peaks)
        full = max(full, ranks * most)
    share = amount(ranks) / ranks
    # With fewer microbatches than ranks 1F1B holds these at most, and an amount below its peak is still that share of p.
    limit = min(amount(ranks) * full / ranks, max(1.0, share) * max(peaks)) + spreading(problem)
    limits = [max(limit, min(_room(problem, rank, amount(ranks)), max(peaks))) for rank in range(ranks)]
    if beside and share <= 1:
        fullest = max(peak + other for peak, other in zip(peaks, beside.stock, strict=True))
        limits = [min(most, max(_GIVEN_UP * most, fullest - other)) for most, other in zip(limits, beside.own, strict=True)]
    return tuple(map(max, least_limits(family, problem), limits))


def _room(problem: Problem, rank: int, amount: float) -> float:
    """Memory of a microbatch of a rank's largest stage and of an amount of the others: where the last stage's logits take as much
    as all else, a limit for the amount has room for one microbatch, and the pipeline would run one after another."""
    *others, largest = sorted(problem.costs.stages[stage].activation for stage in problem.placement.stages[rank])
    return (largest + min(amount, problem.microbatches) * sum(others)) * problem.costs.largest.memory + spreading(problem)


def least_limits(family: Family, problem: Problem) -> tuple[float, ...]:
    """Memory that no rank can do without: one microbatch, or the order in which each W follows its B."""
    ranks, more = problem.ranks, spreading(problem)
    # B and W run as one where B would make activations again.
    grows = {stage for stage, cost in enumerate(problem.costs.stages) if cost.backward_allocates}
    fused = replace(problem.first(4 * ranks), fused=problem.fused | grows)
    if not family.keeps:
        return tuple(fused.microbatch_memory(rank) + more for rank in range(ranks))
    soonest = of_stages(family.name, replace(fused, limits=(0.0,) * ranks))
    return tuple(peak + more for peak in activation_peaks(soonest, problem.costs))


def spreading(problem: Problem) -> float:
    """Memory that a rank may hold more where the vocabulary is spread, in the costs' unit."""
    if problem.vocabulary is None:
        return 0.0
    return postponed(problem.vocabulary, problem.placement.ranks) * largest_microbatch(problem) + logits(problem)


def largest_microbatch(problem: Problem) -> float:
    """The most that a rank can hold of one microbatch's stages."""
    stages, loads = problem.costs.stages, problem.costs.largest
    return max(stage.activation for stage in stages) * problem.placement.chunks * loads.memory


def logits(problem: Problem) -> float:
    """Memory that a rank holds for its shard of the vocabulary: while one S runs, ``MOST_WAITING`` others wait for their T."""
    return (MOST_WAITING + 1) * problem.costs.vocabulary.activation * problem.costs.largest.tokens
