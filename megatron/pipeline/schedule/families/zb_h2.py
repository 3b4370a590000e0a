"""ZB-H2: ZB-H1 with twice the warm-up, which also fills the wait for the first backward, at almost twice the memory.

Qi et al., "Zero Bubble Pipeline Parallelism", section 2.3. With equal stages the span is

    m(F+B+W) + (p-1)(F+B-2W+2*hop)

where m >= 2p-1, W <= F, 2W <= F+B+2*hop and 2*hop <= W: zero bubble in the span if F = B = W. A single iteration
then still has ZB-H1's makespan; the gain comes from the next iteration, which interlocks. Rank r holds at most 2(p-r)-1
whole microbatches, and 2r more of which only W is due: 2p-1 microbatches on every rank if B frees nothing. With few microbatches
the forwards of its warm-up delay the first backward for nothing: where ZB-H1's order is shorter, or limits have room for that
alone, it is taken.
"""

from __future__ import annotations

from megatron.pipeline.schedule.core.passes import Order
from megatron.pipeline.schedule.core.placement import interleaved
from megatron.pipeline.schedule.core.problem import SLACK, Problem
from megatron.pipeline.schedule.families.family import Family
from megatron.pipeline.schedule.families.zb_h1 import as_run, delayed_within_limits
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate


def plan(problem: Problem) -> Order:
    """Rank r runs 2(p-r)-1 forwards before its first B, and W up to 2r microbatches behind B; or ZB-H1's order."""

    def excess_and_value(order: Order) -> tuple[float, float]:
        schedule = as_run(problem, order)
        peaks = activation_peaks(schedule, problem.costs)
        excess = max(peak - limit * SLACK for peak, limit in zip(peaks, problem.limits or peaks, strict=True))
        return max(0.0, excess), problem.value(simulate(schedule, problem.costs))

    return min((delayed_within_limits(problem, depth) for depth in (2, 1)), key=excess_and_value)


FAMILY = Family("zb-h2", interleaved, plan, keeps=lambda p: 2 * p - 1)
