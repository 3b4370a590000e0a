"""Braids: a forward and the backward of another microbatch or chunk run as one.

The collectives of one run while the other computes, as in DualPipe and with megatron-core's ``overlap_moe_expert_parallel_comm``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from megatron.pipeline.planner.schedule.core.kinds import BRAIDED
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.planner.schedule.transforms.transform import changed
from megatron.pipeline.planner.schedule.transforms.trials import Trials

_TRIALS, _EFFORT = 400, 300_000  # the most simulations of the whole schedule, and passes in all of them
_TAKEN_APART = 64  # braids that are tried apart


def braid(schedule: Schedule, problem: Problem) -> Schedule:
    """The same schedule, with braids where these make it no longer.

    A pair is a forward and the next backward of its rank, with nothing but W between them: these then run after the backward,
    which raises no peak of memory, since the forward has reached it. Pairs that follow each other directly are tried first, all
    at once. Where that makes the schedule longer, each half of them is tried, and so on, until single pairs are or enough
    trials have been made; then the other pairs. At last braids near both ends of the schedule are taken apart where that helps.
    Of schedules of one length the one whose passes end earlier is better. A schedule of slices stays as it is.
    """
    if schedule.splits > 1:
        return schedule
    size = sum(map(len, schedule.passes))
    trials = Trials(schedule, problem, min(_TRIALS, max(32, _EFFORT // size)), braids=True)
    for over_weights in (False, True):
        starts = [{timed.work: timed.start for timed in row} for row in simulate(trials.best, problem.costs).ranks]
        pairs = _pairs(trials.best, over_weights)
        trials.halved(sorted(pairs, key=lambda pair: starts[pair[0]][pair[1]]), _with)
    for rank, braided in _from_both_ends(trials.best, problem)[: min(trials.left, _TAKEN_APART)]:
        trials.try_(_apart(trials.best, rank, braided))
    return trials.best


def _from_both_ends(schedule: Schedule, problem: Problem) -> list[tuple[int, Pass]]:
    """(rank, backward) of all braids, the first and the last in time first."""
    timed = [
        (start, rank, work)
        for rank, row in enumerate(simulate(schedule, problem.costs).ranks)
        for work, start, _ in row
        if work.kind.row.braided
    ]
    timed.sort(key=lambda one: one[:2])
    from_ends = sorted(range(len(timed)), key=lambda place: min(place, len(timed) - 1 - place))
    return [timed[place][1:] for place in from_ends]


def _apart(schedule: Schedule, rank: int, braided: Pass) -> Schedule:
    """With one braid less."""
    alone = braided._replace(kind=Kind(braided.kind.row.braided or ""))
    return changed(schedule, [rank], lambda _, work: iter((alone if work == braided else work,)))


def combined(schedule: Schedule) -> Schedule | None:
    """The order of megatron-core's combined 1F1B. None for a schedule that has more than F and BW.

    The forwards that each rank runs before its first backward stay; then pairs of the next forward and the next backward, which
    are braids; then the backwards that are left. A rank holds the activations of one chunk more.
    """
    if any(row.kinds != {Kind.F, Kind.BW} for row in schedule.rows):
        return None
    rows = []
    for row in schedule.passes:
        first = next(slot for slot, work in enumerate(row) if work.kind is Kind.BW)
        forwards, backwards = ([work for work in row if work.kind is kind] for kind in (Kind.F, Kind.BW))
        later = forwards[first:]
        paired = chain(*zip(later, (work._replace(kind=Kind.FBW) for work in backwards), strict=False))
        rows.append((*forwards[:first], *paired, *backwards[len(later) :]))
    return replace(schedule, passes=tuple(rows))


def _pairs(schedule: Schedule, over_weights: bool) -> list[tuple[int, Pass, Pass]]:
    """(rank, forward, backward) of all pairs that could be braids; no pass is in two.

    Args:
        over_weights: whether W may stand between the two.
    """
    found = []
    for rank, row in enumerate(schedule.passes):
        forward: Pass | None = None
        passed = set[int]()  # the chunks of W behind it, whose weights a fused backward may not come before
        for work in row:
            if work.kind is Kind.F:
                forward, passed = work, set()
            elif work.kind is Kind.W and over_weights:
                passed.add(work.chunk)
            else:
                fits = work.kind in BRAIDED and not (work.kind.finishes_weights and work.chunk in passed)
                if forward and fits and forward[1:3] != work[1:3]:
                    found.append((rank, forward, work))
                forward = None
    return found


def _with(schedule: Schedule, pairs: Iterable[tuple[int, Pass, Pass]]) -> Schedule:
    """With these pairs as braids."""
    partners = {(rank, forward): backward for rank, forward, backward in pairs}
    moved = {(rank, backward) for (rank, _), backward in partners.items()}

    def braided(rank: int, work: Pass) -> Iterator[Pass]:
        if (rank, work) not in moved:
            yield work
        if (backward := partners.get((rank, work))) is not None:
            yield backward._replace(kind=BRAIDED[backward.kind])

    return changed(schedule, {rank for rank, _ in moved}, braided)
