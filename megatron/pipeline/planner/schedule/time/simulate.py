"""When every pass of a schedule runs, and the activation memory of every rank, given the costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from itertools import repeat

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.time.clock import Clock
from megatron.pipeline.planner.schedule.time.lanes import switches
from megatron.pipeline.planner.schedule.time.links import rows_of
from megatron.pipeline.planner.schedule.time.replay import replay

__all__ = ["activation_peaks", "simulate"]

R = Kind.R


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run every rank's passes in order, each as soon as the rank is free and its inputs are there.

    A result reaches another rank one ``costs.hop`` after its pass ended, or as ``costs.links`` say, where a message may wait for
    those before it, and its own rank at once. Copies to and from host memory run concurrently with the passes (see ``lanes``).
    Times are in the unit of the costs, from 0; costs given as ``Fraction`` give exact times.

    Raises:
        ValueError: the costs are for another number of stages, or the schedule cannot finish (the stuck pass is named).
    """
    costs.check_placement(schedule.placement)
    costs, ranks = schedule.costs(costs), schedule.ranks
    rows = rows_of(schedule, costs, with_lanes=True)
    starts, ends = replay(schedule, rows)[1:]
    if rows.lanes and costs.copies.disturb_each_other:
        clock = Clock(ranks, rows, switches(ranks, costs.copies))
        clock.follow(rows.passes)
        starts, ends = ([list(row.values()) for row in table] for table in (clock.starts, clock.ends))
    timed = list(map(_timed, rows.works, starts, ends))
    has_waits = rows.lanes or any(row.is_braided for row in schedule.rows)
    computed = tuple(map(_passes, timed[:ranks]) if has_waits else timed)
    on_lanes: list[list[Timed]] = [[] for _ in range(ranks if rows.lanes else 0)]
    for lane, row in zip(rows.lanes, timed[ranks:], strict=True):
        on_lanes[lane.rank] += row
    return Timeline(computed, tuple(tuple(sorted(row, key=lambda each: each.start)) for row in on_lanes))


def _timed(works: Sequence[Pass | None], starts: Sequence[float], ends: Sequence[float]) -> tuple[Timed, ...]:
    # tuple.__new__ is what Timed(work, start, end) calls, and saves a call in Python for each of some hundred thousand passes.
    return tuple(map(tuple.__new__, repeat(Timed), zip(works, starts, ends, strict=True)))


def _passes(row: tuple[Timed, ...]) -> tuple[Timed, ...]:
    """Without the waits of a row."""
    return tuple(each for each in row if each.work is not None)


def activation_peaks(schedule: Schedule, costs: Costs) -> list[float]:
    """The most activation memory each rank holds at once, in the costs' unit.

    F allocates when it starts, B, W and BW free when they end. A rank runs its passes one after another, so the peak
    depends on their order alone.
    """
    return [max(itertools.accumulate(changes, initial=0)) for changes in activation_changes(schedule, costs)]


def activation_profile(schedule: Schedule, timeline: Timeline, costs: Costs) -> list[list[tuple[float, float]]]:
    """For each rank, the moments at which its activation memory changes and what it holds from then on, in the costs' unit."""
    profile: list[list[tuple[float, float]]] = []
    for passes, changes in zip(timeline.ranks, activation_changes(schedule, costs), strict=True):
        held: float = 0
        steps: list[tuple[float, float]] = []
        for (_, start, end), change in zip(passes, changes, strict=True):
            held += change
            steps.append((start if change > 0 else end, held))
        profile.append(steps)
    return profile


def activation_changes(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """For each rank, what every pass allocates (positive) or frees (negative), in the costs' unit."""
    costs.check_placement(schedule.placement)
    costs = schedule.costs(costs)
    unequal = bool(costs.loads)
    allocated = cache(lambda number, *of: costs.of(number).allocated(*of))
    changes: list[list[float]] = []
    for stages, row in zip(schedule.placement.stages, schedule.rows, strict=True):
        again = {(microbatch, chunk) for kind, microbatch, chunk in row.passes if kind is R} if R in row.kinds else ()
        changes.append(
            [
                allocated(microbatch if unequal else 0, kind, stages[chunk], (microbatch, chunk) in again)
                for kind, microbatch, chunk in row.passes
            ]
        )
    return changes
