"""Transformations of schedules: each takes any valid schedule and returns a valid one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from itertools import chain

from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.schedule import Schedule


def changed(schedule: Schedule, ranks: Iterable[int], change: Callable[[int, Pass], Iterator[Pass]]) -> Schedule:
    """The schedule with what ``change`` makes of a rank and a pass in the place of each pass of these ranks."""
    rows = list(schedule.passes)
    for rank in ranks:
        rows[rank] = tuple(chain.from_iterable(change(rank, work) for work in rows[rank]))
    return replace(schedule, passes=tuple(rows))


def recompute(schedule: Schedule, stages: Set[int]) -> Schedule:
    """Run R directly before every backward of these stages that has no R yet.

    R needs no other rank, so it fills the time in which its rank waits for the gradient, and what R allocates is held as
    briefly as possible. Before a braid that is before its forward.
    """

    def with_recomputation(rank: int, work: Pass) -> Iterator[Pass]:
        chosen = work.kind.sends_gradient and schedule.placement.stage(rank, work.chunk) in stages
        if chosen and not schedule.recomputes(rank, work):
            yield work._replace(kind=Kind.R)
        yield work

    rows = [list(row) for row in changed(schedule, _homes(schedule, stages), with_recomputation).passes]
    for row in rows:
        for place in range(2, len(row)):
            if row[place].kind.row.braided and row[place - 1].kind is Kind.R:
                row[place - 2 : place] = row[place - 1], row[place - 2]
    return replace(schedule, passes=tuple(map(tuple, rows)))


def fuse(schedule: Schedule, stages: Set[int]) -> Schedule:
    """Run the backward of these stages as BW in the place of B; other stages stay as they are (selective splitting)."""

    def fused(rank: int, work: Pass) -> Iterator[Pass]:
        if work.kind not in (Kind.B, Kind.W) or schedule.placement.stage(rank, work.chunk) not in stages:
            yield work
        elif work.kind is Kind.B:
            yield work._replace(kind=Kind.BW)

    return changed(schedule, _homes(schedule, stages), fused)


def _homes(schedule: Schedule, stages: Set[int]) -> set[int]:
    """The ranks that hold any of these stages."""
    return {schedule.placement.home(stage)[0] for stage in stages}


def without_copies(schedule: Schedule) -> Schedule:
    """The same schedule without offloading."""
    if not schedule.has_copies:
        return schedule
    passes, boundary = (
        tuple(tuple(work for work in row if not work.kind.is_copy) for row in order)
        for order in (schedule.passes, schedule.boundary)
    )
    return replace(schedule, passes=passes, boundary=boundary)
