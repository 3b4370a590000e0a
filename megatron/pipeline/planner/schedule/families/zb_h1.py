"""ZB-H1 and ZB-H2: 1F1B with the weight gradients split off and delayed into the bubble.

Qi et al., "Zero Bubble Pipeline Parallelism", section 2.3. With equal stages the span of ZB-H1, at the memory of 1F1B, is

    m(F+B+W) + (p-1)(F+B-W) + 4(p-1)*hop

where m > p (m >= p without hops) and 2*hop <= W <= F + 2*hop. ``lower_bound`` shows that nothing with that memory is
shorter. Rank r holds at most p-r whole microbatches, and r more of which only W is due: p microbatches on every rank if
B frees nothing, as many as rank 0 of 1F1B. Where limits have no room for that, as on a last stage whose logits make its
microbatches larger, W is due for fewer: at least p-r microbatches are held, as under 1F1B.

ZB-H2 has twice the warm-up, which also fills the wait for the first backward, at almost twice the memory. Its span is

    m(F+B+W) + (p-1)(F+B-2W+2*hop)

where m >= 2p-1, W <= F, 2W <= F+B+2*hop and 2*hop <= W: zero bubble in the span if F = B = W. A single iteration
then still has ZB-H1's makespan; the gain comes from the next iteration, which interlocks. Rank r holds at most 2(p-r)-1
whole microbatches, and 2r more of which only W is due: 2p-1 microbatches on every rank if B frees nothing. With few microbatches
the forwards of its warm-up delay the first backward for nothing: where ZB-H1's order is shorter, or limits have room for that
alone, it is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.planner.schedule.core.placement import interleaved
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.families.family import Family
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.transform import fuse, recompute


def plan(problem: Problem) -> Order:
    """Rank r runs p-r forwards before its first B, as 1F1B does, and W up to r microbatches behind B."""
    return delayed_within_limits(problem, depth=1)


def plan_h2(problem: Problem) -> Order:
    """Rank r runs 2(p-r)-1 forwards before its first B, and W up to 2r microbatches behind B; or ZB-H1's order."""

    def excess_and_value(order: Order) -> tuple[float, float]:
        schedule = as_run(problem, order)
        peaks = activation_peaks(schedule, problem.costs)
        excess = max(peak - limit * (1 + SLACK) for peak, limit in zip(peaks, problem.limits or peaks, strict=True))
        return max(0.0, excess), problem.value(simulate(schedule, problem.costs))

    return min((delayed_within_limits(problem, depth) for depth in (2, 1)), key=excess_and_value)


def delayed_within_limits(problem: Problem, depth: int) -> Order:
    """``delayed_weights``, where the W of a rank lag by fewer microbatches if its limit has no room for all of these.

    Where a limit has no room for any, its rank runs each W after its B, and holds more than the limit.
    """
    ranks = problem.ranks
    low, high = [0] * ranks, [depth * rank for rank in range(ranks)]
    if problem.limits is None:
        return delayed_weights(ranks, problem.microbatches, depth)
    enough = problem.first(2 * depth * ranks)  # all is then held that ever is
    lags = high
    while True:  # all ranks at once, since what each holds depends on its own lag alone
        peaks = activation_peaks(as_run(enough, delayed_weights(ranks, enough.microbatches, depth, lags)), problem.costs)
        for rank, (lag, peak, limit) in enumerate(zip(lags, peaks, problem.limits, strict=True)):
            if peak <= limit * (1 + SLACK):
                low[rank] = lag
            else:
                high[rank] = max(low[rank], lag - 1)
        if low == high:
            return delayed_weights(ranks, problem.microbatches, depth, low)
        lags = [(least + most + 1) // 2 for least, most in zip(low, high, strict=True)]


def as_run(problem: Problem, order: Order) -> Schedule:
    """The schedule of an order of F, B and W, with the R and BW that a problem asks for."""
    return recompute(fuse(Schedule("", problem.placement, problem.microbatches, order), problem.fused), problem.recompute)


def delayed_weights(ranks: int, microbatches: int, depth: int, lags: Sequence[int] | None = None) -> Order:
    """One F, one B, one W in turn, where W lags behind B by ``depth`` microbatches for every rank before this one.

    Every rank starts with ``depth`` more forwards than the next. Later ranks start late and postpone as many W as the
    earlier ranks have more forwards. So B reaches rank 0 sooner, and the postponed W fill the time after a rank's last B,
    while gradients still travel towards rank 0.

    Args:
        lags: of every rank, in place of these.
    """
    behind = lags or [depth * rank for rank in range(ranks)]
    return tuple(_order(1 + depth * (ranks - 1 - rank), lag, microbatches) for rank, lag in enumerate(behind))


def _order(in_flight: int, lag: int, microbatches: int) -> tuple[Pass, ...]:
    passes = [Pass(Kind.F, microbatch) for microbatch in range(min(in_flight, microbatches))]
    for microbatch in range(microbatches):
        passes.append(Pass(Kind.B, microbatch))
        if microbatch >= lag:
            passes.append(Pass(Kind.W, microbatch - lag))
        if microbatch + in_flight < microbatches:
            passes.append(Pass(Kind.F, microbatch + in_flight))
    passes += [Pass(Kind.W, microbatch) for microbatch in range(max(0, microbatches - lag), microbatches)]
    return tuple(passes)


FAMILY = Family("zb-h1", interleaved, plan, keeps=float, suggested=True)
FAMILY_H2 = Family("zb-h2", interleaved, plan_h2, keeps=lambda p: 2 * p - 1)
