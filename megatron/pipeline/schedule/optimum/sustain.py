"""Can a memory limit sustain the rate? In the long run, with as many microbatches as one likes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.pipeline.schedule.core.problem import Problem
from megatron.pipeline.schedule.optimum.bound import least_limit, lifespans, memory_time, nested
from megatron.pipeline.schedule.optimum.earliest import SLACK, lines, unit
from megatron.pipeline.schedule.optimum.exact import optimum


def period(problem: Problem) -> float:
    """Seconds that the busiest rank computes per microbatch: no schedule runs them faster in the long run."""
    work = [0.0] * problem.ranks
    for line in lines(problem):
        work[line.rank] += line.count * line.seconds
    return max(work) / problem.microbatches


def sustaining_limits(problem: Problem) -> tuple[float, ...]:
    """The memory per rank below which no schedule runs one microbatch per ``period`` in the long run, in the costs' unit.

    Necessary, by two arguments for every rank, and not always sufficient:

    * Area (Qi et al., "Pipeline Parallelism with Controllable Memory", section 3): every microbatch holds at least its
      sizes times their lifespans. At one microbatch per period, the memory that is held is on average that area divided
      by the period, and at some time it is that much. Below this limit L, the span of m microbatches is at least
      m * area / L, and thus grows by more than the period with each.
    * Whole microbatches: between F and B of one stage, a microbatch occupies this and the rank's stages before it. On
      average lifespan / period microbatches do; at some time the next whole number of them does.

    The first is rounded up to what the sizes of the rank add up to, where they are multiples of one size. The problem's
    own limits are ignored.
    """
    rate, count, total = period(problem), problem.microbatches, problem.microbatches * problem.splits
    found = []
    spans = lifespans(problem)
    for rank, area in enumerate(memory_time(problem)):
        limit = least_limit(problem, rank)
        if rate > 0:
            step, average = unit(problem, rank), area / (rate * count)
            limit = max(limit, math.ceil(average / step * (1 - SLACK)) * step if step else average)
            for stage, held in nested(problem, rank):
                passing = len(range(problem.placement.replica(stage), total, problem.placement.replicas))
                limit = max(limit, math.ceil(passing * spans[stage] / (rate * count) * (1 - SLACK)) * held)
        found.append(limit)
    return tuple(found)


def smallest_sustaining_limit(problem: Problem) -> float:
    """The least limit, the same for every rank, that ``sustaining_limits`` does not rule out, in the costs' unit."""
    return max(sustaining_limits(problem))


@dataclass(frozen=True)
class Shortfall:
    """By how much the best schedule of some microbatches exceeds their work on the busiest rank.

    Attributes:
        microbatches: how many.
        least: proven: no schedule is less than this many seconds above ``microbatches * period``.
        found: so many seconds above is the best schedule that was found.
    """

    microbatches: int
    least: float
    found: float


def shortfalls(problem: Problem, microbatches: Sequence[int], seconds: float = 60.0) -> list[Shortfall]:
    """What the limits cost the best schedules of more and more microbatches, found by ``exact.optimum``.

    Where the memory sustains the rate, ``found`` stops growing. Where ``least`` grows with every microbatch beyond what
    fill and drain take, the memory is seen not to sustain it, also where ``sustaining_limits`` cannot tell.

    Args:
        seconds: how long to search for each number of microbatches.

    Raises:
        ValueError: as ``optimum``.
    """
    found = []
    for count in microbatches:
        instance = replace(problem, microbatches=count)
        best, work = optimum(instance, seconds), count * period(problem)
        found.append(Shortfall(count, best.bound - work, best.value - work))
    return found
