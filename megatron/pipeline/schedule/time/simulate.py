"""When every pass runs and what it holds, given the costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import chain, repeat

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import COPY_KINDS, STAGE_KINDS, VOCABULARY_KINDS, Kind, Pass
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.schedule.time.clock import Clock
from megatron.pipeline.schedule.time.lanes import BACK, switches, with_lanes
from megatron.pipeline.schedule.time.replay import replay, results_at_start, rows_of


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run every rank's passes in order, each as soon as the rank is free and its inputs are there.

    A result reaches another rank one ``costs.hop`` after its pass ended, and its own rank at once. Copies to and from host
    memory run beside the passes (see ``lanes``). Times are in the unit of the costs, from 0; costs given as ``Fraction`` give
    exact times.

    Raises:
        ValueError: the costs are for another number of stages, or the schedule cannot finish (the stuck pass is named).
    """
    check_stages(schedule.placement, costs)
    costs = costs.sliced(schedule.splits)
    if schedule.has_copies:
        return _with_copies(schedule, costs)
    rows = rows_of(schedule, costs)
    return Timeline(tuple(map(_timed, rows.passes, *replay(schedule, rows)[1:])))


def _timed(passes: Sequence[Pass], starts: Sequence[float], ends: Sequence[float]) -> tuple[Timed, ...]:
    # tuple.__new__ is what Timed(work, start, end) calls, and saves a call in Python for each of some hundred thousand passes.
    return tuple(map(tuple.__new__, repeat(Timed), zip(passes, starts, ends, strict=True)))


def _with_copies(schedule: Schedule, costs: Costs) -> Timeline:
    """With a row for every copy stream behind those of the ranks."""
    ranks = schedule.ranks
    rows, copy_seconds = with_lanes(schedule, costs)
    seconds = [*[None] * ranks, *copy_seconds]
    starts, ends = replay(schedule, rows, seconds)[1:]
    if costs.copies.disturb_each_other:
        clock = Clock(ranks, rows, results_at_start(schedule, rows), seconds, switches(ranks, costs.copies))
        clock.follow(rows.passes)
        starts, ends = ([list(row.values()) for row in table] for table in (clock.starts, clock.ends))
    timed = list(map(_timed, rows.passes, starts, ends))
    computed = tuple(tuple(one for one in row if one.work.kind is not BACK) for row in timed[:ranks])
    copies = (sorted(chain(*timed[at : at + 2]), key=lambda one: one.start) for at in range(ranks, 3 * ranks, 2))
    return Timeline(computed, tuple(map(tuple, copies)))


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
    check_stages(schedule.placement, costs)
    stages = costs.sliced(schedule.splits).stages
    table = {
        (stage, kind, recomputed): cost.allocated(kind, recomputed)
        for stage, cost in enumerate(stages)
        for kind in (*STAGE_KINDS, *COPY_KINDS)
        for recomputed in (False, True)
    }
    if schedule.vocabulary:
        for kind, stage in itertools.product(VOCABULARY_KINDS, range(len(stages))):
            table[stage, kind, False] = table[stage, kind, True] = costs.vocabulary.allocated(kind)
    changes: list[list[float]] = []
    for rank, passes in enumerate(schedule.passes):
        mine = schedule.placement.stages[rank]
        recomputed = {(work.microbatch, work.chunk) for work in passes if work.kind is Kind.R}
        changes.append(
            [table[mine[work.chunk], work.kind, (work.microbatch, work.chunk) in recomputed] for work in passes]
            if recomputed
            else [table[mine[work.chunk], work.kind, False] for work in passes]
        )
    return changes


def check_stages(placement: Placement, costs: Costs) -> None:
    """Raises:
    ValueError: the costs are for another number of stages than the placement has.
    """
    stages = placement.ranks * placement.chunks
    if len(costs.stages) != stages:
        raise ValueError(
            f"costs of {len(costs.stages)} stages for a placement of {stages} ({placement.ranks} ranks with "
            f"{placement.chunks} chunks each); give one StageCosts per stage"
        )
