"""1F1B: fill the pipeline with forwards, then alternate one forward and one (fused) backward.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush). With equal stages the span is

    m(F+B+W) + (p-1)(F+B+W) + hop*(2m(p-1)/p + 2(p-2))

where p > 1 and m is a multiple of p, and for every m without hops. Rank r holds min(m, p-r) microbatches.
"""

from __future__ import annotations

from megatron.pipeline.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.schedule.core.placement import interleaved
from megatron.pipeline.schedule.core.problem import Problem
from megatron.pipeline.schedule.families.family import Family


def plan(problem: Problem) -> Order:
    """Rank r runs p-r forwards before its first backward, so that it holds p-r microbatches from then on."""
    return tuple(_order(problem.ranks - rank, problem.microbatches) for rank in range(problem.ranks))


def _order(in_flight: int, microbatches: int) -> tuple[Pass, ...]:
    passes = [Pass(Kind.F, microbatch) for microbatch in range(min(in_flight, microbatches))]
    for microbatch in range(microbatches):
        passes.append(Pass(Kind.BW, microbatch))
        if microbatch + in_flight < microbatches:
            passes.append(Pass(Kind.F, microbatch + in_flight))
    return tuple(passes)


FAMILY = Family("1f1b", interleaved, plan, fused=True, exposed_hops=1.0, suggested=True)
