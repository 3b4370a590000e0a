"""Interleaved 1F1B: every rank holds v chunks, so that the pipeline fills and drains in v times shorter steps.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2. With equal
stages, without hops and where m is a multiple of p, the span and the makespan are

    m(F+B+W) + (p-1)(F+B+W)/v

Rank r holds at most min(mv, 2(p-r-1) + (v-1)g + 1) chunks of a microbatch, each 1/v of what a rank allocates for it. g = p
microbatches run through a chunk before the next one's turn, unless ``group`` sets more. Any m is planned within the same memory:
a last group of fewer than p is one of p, with the surplus microbatches left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.planner.schedule.core.placement import interleaved
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.families.family import Family


def plan(problem: Problem) -> Order:
    """Rank r runs 2(p-r-1) + (v-1)g forwards, then one forward and one backward in turn, chunk by chunk in groups of g.

    Raises:
        ValueError: the group is smaller than the pipeline.
    """
    ranks, chunks, microbatches = problem.ranks, problem.placement.chunks, problem.microbatches
    group = ranks if problem.group is None else problem.group
    if group < ranks:
        raise ValueError(
            f"with {ranks} ranks interleaved has groups of {ranks} microbatches or more, got {group}: leave the group out for "
            f"{ranks}, or take gis, whose groups may be smaller"
        )
    whole = microbatches + max(0, ranks - last) if (last := microbatches % group) else microbatches
    order = list(chunk_by_chunk(whole, group, chunks))
    rows = (_order(order, chunks, warm_up=2 * (ranks - rank - 1) + (chunks - 1) * group) for rank in range(ranks))
    # Passes need only passes of the same microbatch, so the order stays valid without the surplus.
    return tuple(tuple(work for work in row if work.microbatch < microbatches) for row in rows)


def chunk_by_chunk(microbatches: int, group: int, chunks: int) -> Iterator[tuple[int, int]]:
    """(microbatch, chunk) in the order in which forwards run: a group of microbatches through one chunk, then the next chunk."""
    for first in range(0, microbatches, group):
        for chunk in range(chunks):
            for microbatch in range(first, min(first + group, microbatches)):
                yield microbatch, chunk


def _order(order: list[tuple[int, int]], chunks: int, warm_up: int) -> Iterator[Pass]:
    in_flight = min(warm_up + 1, len(order))
    yield from (Pass(Kind.F, *item) for item in order[:in_flight])
    for number, (microbatch, chunk) in enumerate(order):
        yield Pass(Kind.BW, microbatch, chunks - 1 - chunk)
        if number + in_flight < len(order):
            yield Pass(Kind.F, *order[number + in_flight])


FAMILY = Family(
    "interleaved",
    interleaved,
    plan,
    chunks=2,
    any_chunks=True,
    least_chunks=2,
    grouped=True,
    fused=True,
    exposed_hops=0.5,
    suggested=True,
)
