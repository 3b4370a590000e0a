"""1F1B, and Seq1F1B: 1F1B of S slices of every microbatch along the sequence, which fill the pipeline S times faster.

Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language Model Training", section 3. With equal
stages and equal slices, without hops, the span and the makespan for every m are

    m(F+B+W) + (p-1)(F+B+W)/S

Rank r (0-based) runs p-r-2+S slice forwards before one forward and one backward alternate: S-1 more than in 1F1B, because
the last slice of a microbatch is the first to go back. So it holds at most min(mS, p-r-1+S) slices, 1/S of a
microbatch each.

S = 1 is 1F1B: the pipeline is filled with forwards, then one forward and one (fused) backward alternate (Narayanan et al.,
"Memory-Efficient Pipeline-Parallel DNN Training", PipeDream-Flush). Rank r holds min(m, p-r) microbatches, and the span is

    m(F+B+W) + (p-1)(F+B+W) + hop*(2m(p-1)/p + 2(p-2))

where p > 1 and m is a multiple of p, and for every m without hops.
"""

from __future__ import annotations

from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.planner.schedule.core.placement import interleaved
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.families.family import Family


def plan(problem: Problem) -> Order:
    """Forwards in the order of the slices; backwards in the order of the microbatches, the slices of each in reverse."""
    return tuple(
        _order(problem.ranks - rank - 1 + problem.splits, problem.microbatches, problem.splits) for rank in range(problem.ranks)
    )


def _order(in_flight: int, microbatches: int, splits: int) -> tuple[Pass, ...]:
    slices = microbatches * splits
    passes = [Pass(Kind.F, number) for number in range(min(in_flight, slices))]
    for number in range(slices):
        microbatch, part = divmod(number, splits)
        passes.append(Pass(Kind.BW, microbatch * splits + splits - 1 - part))
        if number + in_flight < slices:
            passes.append(Pass(Kind.F, number + in_flight))
    return tuple(passes)


FAMILY = Family("seq-1f1b", interleaved, plan, splits=2, fused=True)
FAMILY_1F1B = Family("1f1b", interleaved, plan, fused=True, exposed_hops=1.0, suggested=True)
