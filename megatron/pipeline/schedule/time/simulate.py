"""When every pass runs and what it holds, given the costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from itertools import repeat

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.kinds import COPY_LANES, needed_on_own_rank
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.schedule.time.lanes import on_the_way
from megatron.pipeline.schedule.time.links import Rows, lane_rows, rows_of
from megatron.pipeline.schedule.time.replay import Replay, replay

R = Kind.R
_ROUNDS = 20  # more than enough, unless passes wait for copies everywhere


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
    if schedule.has_lanes:
        return _with_lanes(schedule, costs)
    rows = rows_of(schedule, costs)
    return Timeline(tuple(map(_timed, rows.works, *replay(schedule, rows)[1:])))


def _timed(works: Sequence[Pass | None], starts: Sequence[float], ends: Sequence[float]) -> tuple[Timed, ...]:
    # tuple.__new__ is what Timed(work, start, end) calls, and saves a call in Python for each of some hundred thousand passes.
    return tuple(map(tuple.__new__, repeat(Timed), zip(works, starts, ends, strict=True)))


def _with_lanes(schedule: Schedule, costs: Costs) -> Timeline:
    """With a row for every lane behind those of the ranks."""
    ranks = schedule.ranks
    lanes = lane_rows(schedule, costs)
    rows = rows_of(schedule, costs, lanes)
    alone = [lane.seconds for lane in lanes]
    copying = [at for at, lane in enumerate(lanes) if lane.lane in COPY_LANES]
    run = replay(schedule, rows, [*repeat(None, ranks), *alone])
    if costs.copies.disturb_each_other and copying:
        # How long copies take depends on when they start, and when they start, where passes wait for them, on how long others
        # took. Copies that keep nothing waiting, as is planned for, are settled after the first round.
        for _ in range(_ROUNDS):
            ready = list(_ready(schedule, rows, run))
            queues = [list(zip(ready[at], alone[at], strict=True)) for at in copying]
            taken = list(alone)
            for at, times in zip(copying, on_the_way(queues, costs.copies), strict=True):
                taken[at] = [end - start for start, end in times]
            before, run = run, replay(schedule, rows, [*repeat(None, ranks), *taken])
            if all(
                math.isclose(end, other, rel_tol=1e-9)
                for row, others in zip(run.ends, before.ends, strict=True)
                for end, other in zip(row, others, strict=True)
            ):
                break
    timed = list(map(_timed, rows.works, *run[1:]))
    computed = tuple(tuple(one for one in row if one.work is not None) for row in timed[:ranks])
    on_lanes: list[list[Timed]] = [[] for _ in range(ranks)]
    for lane, row in zip(lanes, timed[ranks:], strict=True):
        on_lanes[lane.rank] += row
    return Timeline(computed, tuple(tuple(sorted(row, key=lambda one: one.start)) for row in on_lanes))


def _ready(schedule: Schedule, rows: Rows, run: Replay) -> Iterator[list[float]]:
    """From when on every pass on a lane may start, by lane: once what it needs has ended, or its place in the row is reached."""
    for lane in rows.lanes:
        ends = dict(zip(rows.works[lane.rank], run.ends[lane.rank], strict=True))
        yield [
            ends[work if work.kind.row.starts else work._replace(kind=needed_on_own_rank(work.kind)[0])] for work in lane.passes
        ]


def delay(schedule: Schedule, costs: Costs, rank: int, work: Pass, other: int, need: Pass) -> float:
    """How long after ``need`` ended on another rank, or this one, it has arrived where ``work`` needs it.

    What all ranks have a part in takes a collective, and with one barrier the gradient two: S's parts have to be weighed against
    each other before they are summed.
    """
    if need.kind.is_of_vocabulary:
        return costs.exchange * (2 if need.kind is Kind.S and work.kind.sends_gradient else 1)
    if other == rank:
        return 0
    return costs.exchange if work.kind.is_of_vocabulary else costs.hop


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
    costs = costs.sliced(schedule.splits)
    changes: list[list[float]] = []
    for stages, row in zip(schedule.placement.stages, schedule.rows, strict=True):
        table = {
            (kind, chunk, recomputed): costs.allocated(kind, stage, recomputed)
            for chunk, stage in enumerate(stages)
            for kind in row.kinds
            for recomputed in (False, True)
        }
        again = {(microbatch, chunk) for kind, microbatch, chunk, _ in row.passes if kind is R} if R in row.kinds else ()
        parts = row.parts if row.is_divided else None
        changes.append(
            [table[kind, chunk, (microbatch, chunk) in again] for kind, microbatch, chunk, _ in row.passes]
            if parts is None
            else [table[work.kind, work.chunk, (work.microbatch, work.chunk) in again] / parts(work) for work in row.passes]
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
