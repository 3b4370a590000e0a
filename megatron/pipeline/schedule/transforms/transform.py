"""Transformations of schedules: each takes any valid schedule and returns a valid one."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.schedule import Schedule


def recompute(schedule: Schedule, stages: Set[int]) -> Schedule:
    """Run R directly before every backward of these stages that has no R yet.

    R needs no other rank, so it fills the time in which its rank waits for the gradient, and what R allocates is held as
    briefly as possible.
    """
    if not stages:
        return schedule
    rows = []
    for rank, passes in enumerate(schedule.passes):
        present = set(passes)
        row: list[Pass] = []
        for work in passes:
            again = Pass(Kind.R, work.microbatch, work.chunk)
            if work.kind.sends_gradient and schedule.placement.stage(rank, work.chunk) in stages and again not in present:
                row.append(again)
            row.append(work)
        rows.append(tuple(row))
    return replace(schedule, passes=tuple(rows))


def fuse(schedule: Schedule, stages: Set[int]) -> Schedule:
    """Run the backward of these stages as BW in the place of B; other stages stay as they are (selective splitting)."""
    if not stages:
        return schedule
    rows = []
    for rank, passes in enumerate(schedule.passes):
        row: list[Pass] = []
        for work in passes:
            if work.kind in (Kind.B, Kind.W) and schedule.placement.stage(rank, work.chunk) in stages:
                if work.kind is Kind.B:
                    row.append(work._replace(kind=Kind.BW))
            else:
                row.append(work)
        rows.append(tuple(row))
    return replace(schedule, passes=tuple(rows))


def without_copies(schedule: Schedule) -> Schedule:
    """The same schedule without offloading."""
    if not schedule.has_copies:
        return schedule
    return replace(schedule, passes=tuple(tuple(work for work in row if not work.kind.is_copy) for row in schedule.passes))
