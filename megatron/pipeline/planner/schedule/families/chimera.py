"""Chimera: 1F1B from both ends of the pipeline at once, with the model stored twice.

Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", section 3; more than
p microbatches are units of p, one after another (its "direct concatenation"). With equal stages, without hops and
where m is a multiple of p, the bubble of the span and of the makespan is

    (p-2)(max(F, B+W) + (m/p - 1)|B+W-F|)

For m = p that is the published share of idle time, (p-2)/(2m+p-2) where F = B+W and (p-2)/(3m/2+p-2) where 2F = B+W. Rank r
holds at most p/2+1+min(r, p-1-r) microbatches: p/2+1 at the ends, p in the middle, however many units there are. Any other m
is planned too, within the same memory.
"""

from __future__ import annotations

from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.planner.schedule.core.placement import bidirectional
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.families.family import Family


def plan(problem: Problem) -> Order:
    """Every pass at its slot, where F and BW take one slot each: the two directions never claim the same one.

    Microbatch j of a direction runs F on its stage s in slot s + 2j and BW in slot 2p-1-s + 2j. On one rank, F of one direction
    and BW of the other have the same parity, and are p/2 microbatches apart; so a unit of p microbatches, half of them in each
    direction, has no conflict. A unit starts every 2p slots: its first F follow the last BW of the unit before without a gap.
    """
    ranks = problem.ranks
    rows = []
    for rank in range(ranks):
        slots: list[tuple[int, Pass]] = []
        for microbatch in range(problem.microbatches):
            unit, place = divmod(microbatch, ranks)
            number, chunk = divmod(place, 2)
            stage = ranks - 1 - rank if chunk else rank
            start = 2 * (ranks * unit + number)
            slots.append((start + stage, Pass(Kind.F, microbatch, chunk)))
            slots.append((start + 2 * ranks - 1 - stage, Pass(Kind.BW, microbatch, chunk)))
        rows.append(tuple(work for _, work in sorted(slots)))
    return tuple(rows)


FAMILY = Family("chimera", lambda ranks, chunks: bidirectional(ranks), plan, chunks=2, least_ranks=2, even_ranks=True, fused=True)
