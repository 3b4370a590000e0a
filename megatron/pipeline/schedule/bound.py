"""How good can a schedule be? A bound below which no order of the passes can bring the span, or the makespan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron.pipeline.schedule.earliest import SLACK, Earliest, Times, backwards_in_time, lines, usable
from megatron.pipeline.schedule.passes import Kind
from megatron.pipeline.schedule.problem import Objective, Problem

ORIGINS = 4  # from how many ranks' points of view at least a span is looked at, where there are many ranks
SWEEPS = 2  # the first finds what a full memory holds up, the second what that holds up; more have found nothing


def lower_bound(problem: Problem) -> float:
    """A span (or makespan, if that is the objective) that no schedule can beat.

    It holds for every order of the passes that keeps the dependencies, the order of microbatches on each chunk and the
    limits, with any mixture of BW and of B and W on the stages that the problem does not fuse.

    The span is at least that of every rank, so take one rank, counted from its first pass, with W seconds of work.

    * Head: before the moment T after its first pass, the rank can have done only U(T) < T seconds of work: the first
      gradient is still on its way, what came before fills the memory, and on other ranks too microbatches wait for memory
      (``Earliest``). The rank idles for at least T - U(T) then, and if U(T) < W, all of it lies within its span.
    * Tail: the same, backwards in time, from the end of the rank's last pass, with T' and U'.
    * Both: if U(T) + U'(T') <= W, head and tail cannot overlap: together they would hold all the work. The same is true
      if the span is known to be at least T + T'. Then T - U(T) and T' - U'(T') both count.
    * The last pass of any kind on the rank ends no earlier than ``Earliest`` says.
    * Memory: what microbatches allocate they hold for at least their way to the last stage and back. Size times seconds,
      over all microbatches, has to fit into limit times span.

    For the makespan, time is counted from the first pass of all ranks, and to the last of all; the rest is the same.

    At equal costs this is the span of ZB-H1 and ZB-V, and with their memory that of V-Half and, mostly, V-Min (Qi et al.,
    "Zero Bubble Pipeline Parallelism" and "Pipeline Parallelism with Controllable Memory"), which are thereby optimal.

    Returns:
        Seconds (the unit of the costs); infinite if not even one microbatch fits into the limits.
    """
    limits = [usable(problem, rank) for rank in range(problem.ranks)]
    if any(least_limit(problem, rank) > limit * (1 + SLACK) for rank, limit in enumerate(limits)):
        return math.inf
    forward = lines(problem)
    count = max(line.count for line in forward)
    first, last = problem.ranks + 8, 4
    numbers = sorted({*range(min(first, count)), *range(max(0, count - last), count)})
    work = [math.fsum(line.count * line.seconds for line in forward if line.rank == rank) for rank in range(problem.ranks)]
    origins = _origins(work, len(numbers)) if problem.objective is Objective.SPAN else [None]
    head = Earliest(problem, forward, origins, numbers)
    tail = Earliest(problem, backwards_in_time(forward), origins, numbers)
    for _ in range(SWEEPS):
        head.sweep()
        tail.sweep()
    areas = [area / limit if 0 < limit < math.inf else 0.0 for area, limit in zip(memory_time(problem), limits, strict=True)]
    best = max(*work, *areas)
    for at, origin in enumerate(origins):
        for rank in range(problem.ranks) if origin is None else [origin]:
            last = max(head.last_end(at, rank), tail.last_end(at, rank))
            best = max(best, last, _with_idle_time(work[rank], head.windows(at, rank), tail.windows(at, rank), last))
    return best


def least_limit(problem: Problem, rank: int) -> float:
    """The memory without which a rank cannot run even one microbatch, in the costs' unit.

    When a stage runs its first backward, the microbatch (all its slices) occupies that stage and, of those of the rank, the
    stages before it. Where R follows, these hold no more than what is kept for it.
    """
    placement, least = problem.placement, 0.0
    for replica in range(placement.replicas):
        held = 0.0
        for stage in sorted(placement.stages[rank]):
            if placement.replica(stage) == replica and replica < problem.microbatches:
                cost = problem.costs.stages[stage]
                kept = cost.checkpoint if stage in problem.recompute else cost.activation
                held += kept
                least = max(least, held + (cost.activation - kept) / problem.splits)
    return least


def _origins(work: list[float], followed: int) -> Sequence[int | None]:
    """The ranks whose span is bounded: all, or the first, the last and those with the most work, to keep it fast."""
    by_work = sorted(range(len(work)), key=lambda rank: -work[rank])
    ordered = dict.fromkeys([by_work[0], 0, len(work) - 1, *by_work])
    return sorted(list(ordered)[: max(ORIGINS, 500 // followed)])


def _with_idle_time(work: float, head: tuple[Times, Times], tail: tuple[Times, Times], known: float) -> float:
    """The rank's work, and the most idle time of a head, of a tail, or of both where they cannot overlap.

    ``known`` is a bound of this rank's span.
    """
    (heads, head_idle, head_work), (tails, tail_idle, tail_work) = _idle(work, *head), _idle(work, *tail)
    best = work + float(max(head_idle[-1], tail_idle[-1]))
    for limits, lengths in ((work - tail_work, head_work), (max(known, best) - tails, heads)):
        at = np.searchsorted(lengths, limits * (1 - SLACK), side="right") - 1
        both = np.where(at >= 0, head_idle[at] + tail_idle, 0)
        best = max(best, work + float(both.max()))
    return best


def _idle(work: float, moments: Times, most: Times) -> tuple[Times, Times, Times]:
    """Moments, the idle time known to lie before each, and the work that allows; from none at moment 0."""
    within = most < work * (1 - SLACK)
    moments, most = (np.concatenate([[0.0], values[within]]) for values in (moments, most))
    return moments, np.maximum.accumulate(np.maximum(moments - most, 0)), np.maximum.accumulate(most)


def memory_time(problem: Problem) -> list[float]:
    """What all microbatches of an iteration hold on every rank at least, size times seconds, in the costs' units.

    A stage holds what F allocates until the microbatch has gone to the last stage and back (its lifespan, in the words of
    Qi et al., "Pipeline Parallelism with Controllable Memory", section 3), what R allocates from R until B ends, and what
    is retained until W ends.
    """
    placement, costs = problem.placement, problem.costs.sliced(problem.splits)
    held = [0.0] * problem.ranks
    life = 0.0
    for stage in reversed(range(placement.last_stage + 1)):
        cost, rank, again = costs.stages[stage], placement.home(stage)[0], stage in problem.recompute
        both = float(cost.seconds(Kind.BW))
        backward = both if stage in problem.fused else min(float(cost.backward), both)
        weight = min(float(cost.backward + cost.weight), both) - backward
        if placement.is_last(stage):
            life = cost.recompute if again else 0.0
        elif placement.home(stage + 1)[0] != rank:
            life += 2 * costs.hop
        life += cost.forward + backward
        kept = cost.checkpoint if again else cost.activation
        each = kept * life + (cost.activation - kept) * (cost.recompute + backward)
        each += 0 if stage in problem.fused else cost.retained * weight
        total = len(range(placement.replica(stage), problem.microbatches * problem.splits, placement.replicas))
        held[rank] += total * float(each)
    return held
