"""ZB-H1: 1F1B with the weight gradients split off and delayed into the bubble, at the memory of 1F1B.

Qi et al., "Zero Bubble Pipeline Parallelism", section 2.3. With equal stages the span is

    m(F+B+W) + (p-1)(F+B-W) + 4(p-1)*hop

where m > p (m >= p without hops) and 2*hop <= W <= F + 2*hop. ``lower_bound`` shows that nothing with that memory is
shorter. Rank r holds at most p-r whole microbatches, and r more of which only W is due: p microbatches on every rank if
B frees nothing, as many as rank 0 of 1F1B.
"""

from __future__ import annotations

from megatron.pipeline.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.schedule.core.placement import interleaved
from megatron.pipeline.schedule.core.problem import Problem
from megatron.pipeline.schedule.families.family import Family


def plan(problem: Problem) -> Order:
    """Rank r runs p-r forwards before its first B, as 1F1B does, and W r microbatches behind B."""
    return delayed_weights(problem.ranks, problem.microbatches, depth=1)


def delayed_weights(ranks: int, microbatches: int, depth: int) -> Order:
    """One F, one B, one W in turn, where W lags behind B by ``depth`` microbatches for every rank before this one.

    Every rank starts with ``depth`` more forwards than the next. Later ranks start late and postpone as many W as the
    earlier ranks have more forwards. So B reaches rank 0 sooner, and the postponed W fill the time after a rank's last B,
    while gradients still travel towards rank 0.
    """
    return tuple(
        _order(in_flight=1 + depth * (ranks - 1 - rank), lag=depth * rank, microbatches=microbatches) for rank in range(ranks)
    )


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


FAMILY = Family("zb-h1", interleaved, plan, suggested=True)
