"""The memory that a pipeline needs to run one microbatch per period in the long run, however many microbatches there are."""

from __future__ import annotations

import math

from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.optimum.bound import least_limit, lifespans, memory_time, nested, rank_seconds
from megatron.pipeline.planner.schedule.optimum.earliest import unit


def period(problem: Problem) -> float:
    """Seconds that the busiest rank computes for one microbatch: in the long run no schedule needs less per microbatch."""
    return max(rank_seconds(problem)) / problem.microbatches


def sustaining_limits(problem: Problem) -> tuple[float, ...]:
    """The memory per rank below which no schedule runs one microbatch per ``period`` in the long run, in the costs' unit.

    Necessary, by two arguments for every rank, and not always sufficient:

    * Area (Qi et al., "Pipeline Parallelism with Controllable Memory", section 3): a microbatch holds at least its sizes
      times their lifespans, its area. At one microbatch per period, a rank holds area / period on average, and at least
      that much at some time. With a limit L below this, the span of m microbatches is at least m * area / L, so every
      further microbatch adds more than a period.
    * Whole microbatches: between F and B of one stage, a microbatch occupies that stage and the rank's stages before it.
      On average lifespan / period microbatches do so; at some time the next whole number does.

    The first limit is rounded up to a multiple of the rank's unit of memory, if all its sizes are multiples of one. The
    problem's own limits are ignored.
    """
    rate, count, total = period(problem), problem.microbatches, problem.microbatches * problem.splits
    limits = []
    spans = lifespans(problem)
    for rank, area in enumerate(memory_time(problem)):
        limit = least_limit(problem, rank)
        if rate > 0:
            step, average = unit(problem, rank), area / (rate * count)
            limit = max(limit, math.ceil(average / step * (1 - SLACK)) * step if step else average)
            for stage, held in nested(problem, rank):
                limit = max(limit, math.ceil(total * spans[stage] / (rate * count) * (1 - SLACK)) * held)
        limits.append(limit)
    return tuple(limits)


def smallest_sustaining_limit(problem: Problem) -> float:
    """The least limit, the same for every rank, that ``sustaining_limits`` does not rule out, in the costs' unit."""
    return max(sustaining_limits(problem))
