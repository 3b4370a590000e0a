"""Transformations of schedules: each takes any valid schedule and returns a valid one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from itertools import chain

from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.schedule import Schedule


def recompute(schedule: Schedule, stages: Set[int]) -> Schedule:
    """Run R directly before every backward of these stages that has no R yet.

    R needs no other rank, so it fills the time in which its rank waits for the gradient, and what R allocates is held as
    briefly as possible. Before a braid that is before its forward.
    """

    def with_recomputation(rank: int, work: Pass) -> Iterator[Pass]:
        if work.kind.sends_gradient and not schedule.recomputes(rank, work):
            yield work._replace(kind=Kind.R)
        yield work

    recomputed = _changed(schedule, stages, with_recomputation)
    rows = [list(row) for row in recomputed.passes]
    for row in rows:
        for place in range(2, len(row)):
            if row[place].kind.row.braided and row[place - 1].kind is Kind.R:
                row[place - 2 : place] = row[place - 1], row[place - 2]
    return replace(recomputed, passes=tuple(map(tuple, rows)))


def fuse(schedule: Schedule, stages: Set[int]) -> Schedule:
    """Run the backward of these stages as BW in the place of B; other stages stay as they are (selective splitting)."""

    def fused(rank: int, work: Pass) -> Iterator[Pass]:
        if work.kind is not Kind.W:
            yield work._replace(kind=Kind.BW) if work.kind is Kind.B else work

    return _changed(schedule, stages, fused)


def _changed(schedule: Schedule, stages: Set[int], change: Callable[[int, Pass], Iterator[Pass]]) -> Schedule:
    """The schedule with other passes in the place of each pass of some stages."""
    rows = []
    for rank, passes in enumerate(schedule.passes if stages else ()):
        chunks = {chunk for chunk, stage in enumerate(schedule.placement.stages[rank]) if stage in stages}
        rows.append(tuple(chain(*(change(rank, work) if work.chunk in chunks else (work,) for work in passes))))
    return replace(schedule, passes=tuple(rows)) if stages else schedule


def without_copies(schedule: Schedule) -> Schedule:
    """The same schedule without offloading."""
    if not schedule.has_copies:
        return schedule
    return replace(schedule, passes=tuple(tuple(work for work in row if not work.kind.is_copy) for row in schedule.passes))
