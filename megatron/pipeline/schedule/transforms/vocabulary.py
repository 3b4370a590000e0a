"""The passes of a vocabulary that is spread over all ranks, inserted into any schedule: transformer passes in, all passes out.

``postpone`` gives every microbatch more time between its last F and its first B: as many intervals (the time in which every
rank works through one microbatch) as there are barriers between the ranks on that way. ``spread`` then puts the vocabulary's
passes where ranks are free for them. The argument is that of Yeung et al., "Balancing Pipeline Parallelism with Vocabulary
Parallelism" (arXiv 2411.05288), section 5: a microbatch more is held for every interval, and no bubble is added.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import VOCABULARY_KINDS, Kind, Pass, Vocabulary
from megatron.pipeline.schedule.core.schedule import MOST_WAITING, Schedule
from megatron.pipeline.schedule.time.replay import Stuck, dependency_order
from megatron.pipeline.schedule.time.simulate import delay


def postponed(vocabulary: Vocabulary | None, ranks: int) -> int:
    """By how many microbatches backwards are postponed, and how many more every rank so holds.

    One for each barrier. Interlaced, where every rank stands still for the vocabulary of each microbatch, needs half a
    pipeline more (nnScaler's schedule; Yeung et al., section 6: 1.5 times the activations of 1F1B).
    """
    match vocabulary:
        case None:
            return 0
        case Vocabulary.ONE_BARRIER:
            return 1
        case Vocabulary.TWO_BARRIERS:
            return 2
        case Vocabulary.INTERLACED:
            return math.ceil(ranks / 2)


def postpone(schedule: Schedule, by: int) -> Schedule:
    """The same passes with more time between the forwards and the backwards: ``by`` microbatches'.

    Every backward comes after as many more forwards as so many microbatches have on a rank. Where ranks are far from doing the
    same in turn, that can make them wait for each other in a circle: then every backward is where the one of ``by`` microbatches
    later was, which never does.

    Either way it obeys the rules that the schedule obeys, and no rank holds more than ``by`` microbatches more.
    """
    ahead = _forwards_ahead(schedule, by)
    try:
        dependency_order(ahead)
    except Stuck:
        return _backwards_behind(schedule, by)
    return ahead


def _forwards_ahead(schedule: Schedule, by: int) -> Schedule:
    rows = []
    for passes in schedule.passes:
        forwards = [work for work in passes if work.kind is Kind.F]
        row: list[Pass] = []
        before, done = by * schedule.placement.chunks, 0
        for work in passes:
            if work.kind is Kind.F:
                before += 1
                continue
            row += forwards[done:before]
            done = max(done, min(before, len(forwards)))
            row.append(work)
        rows.append((*row, *forwards[done:]))
    return replace(schedule, passes=tuple(rows))


def _backwards_behind(schedule: Schedule, by: int) -> Schedule:
    rows = []
    for passes in schedule.passes:
        present, row = set(passes), dict[Pass, None]()
        for work in passes:
            if work.kind is Kind.F:
                row[work] = None
            elif work.kind is not Kind.R:
                # Which of a microbatch's backwards are split, and which run again, stays as it is.
                kinds: tuple[Kind, ...] = (Kind.W,) if work.kind is Kind.W else (Kind.R, Kind.B, Kind.BW)
                kinds += (Kind.W,) if work.kind is Kind.BW else ()
                earlier = (work._replace(kind=kind, microbatch=work.microbatch - by) for kind in kinds)
                for one in filter(present.__contains__, earlier):
                    if one.kind is Kind.BW:  # adds to gradients that the microbatches before it have to be in
                        before = (one._replace(kind=Kind.W, microbatch=number) for number in range(one.microbatch))
                        row |= dict.fromkeys(filter(present.__contains__, before))
                    row[one] = None
        rows.append((*row, *(work for work in passes if work not in row)))
    return replace(schedule, passes=tuple(rows))


def spread(schedule: Schedule, vocabulary: Vocabulary, costs: Costs) -> Schedule:
    """Insert S, T, IF and IB of every microbatch on every rank.

    Ranks are followed through time. A rank that is free takes S first, since the last stage waits for all S (and for all T,
    with two barriers); then IF, as long as at most ``MOST_WAITING`` embeddings wait for the first stage; then its next pass
    of a stage, or where that is a forward that has to wait, the backward that comes first after it. T (with one barrier) and
    IB can wait, as W can: they fill the time in which the rank has nothing else to do, unless ``MOST_WAITING`` of them wait
    already.

    Args:
        schedule: of stages' passes; ``postpone`` has made room. It may be of forwards alone.
        costs: what passes take, those of the vocabulary too.

    Raises:
        ValueError: the schedule cannot finish.
    """
    ranks = _Ranks(replace(schedule, vocabulary=vocabulary), costs)
    return replace(schedule, vocabulary=vocabulary, passes=ranks.run())


class _Ranks:
    """All ranks, as they work through their passes and those of the vocabulary."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule, costs
        self._rows: list[list[Pass]] = [[] for _ in schedule.passes]
        self._left = [deque(passes) for passes in schedule.passes]  # passes of stages
        self._counts = [dict.fromkeys(VOCABULARY_KINDS, 0) for _ in schedule.passes]  # done, by rank
        self._free = [0.0] * schedule.ranks
        self._made: dict[tuple[int, Pass] | tuple[Kind, int], float] = {}  # passes, and those of all ranks, with their ends
        self._parts: dict[tuple[Kind, int], list[float]] = {}
        self._trains = any(not work.kind.is_forward for work in schedule.passes[0])
        self._embedded = 0  # microbatches that the first stage has begun
        self._together: list[float] = []  # interlaced, when all ranks run S of a microbatch, as far as that is known
        stages = [sum(costs.stages[stage].total for stage in row) for row in schedule.placement.stages]
        self._interval = max(stages) + costs.vocabulary.total + costs.exchange
        self._moments: list[tuple[float, int]] = [(0.0, rank) for rank in range(schedule.ranks)]  # at which to look at a rank
        placement = schedule.placement
        self._first, self._last = placement.home(0), placement.home(placement.last_stage)

    def run(self) -> tuple[tuple[Pass, ...], ...]:
        """The passes of all ranks.

        Raises:
            ValueError: nothing is left that could run.
        """
        kinds = len(VOCABULARY_KINDS) if self._trains else 2
        left = sum(map(len, self._schedule.passes)) + kinds * self._schedule.microbatches * self._schedule.ranks
        while self._moments:
            now, rank = heapq.heappop(self._moments)
            if now < self._free[rank]:
                continue
            work = self._choose(rank, now)
            if work is not None:
                self._start(rank, work, now)
                left -= 1
        if left:
            raise ValueError(f"{self._schedule.name} cannot finish: {left} passes wait for each other")
        return tuple(map(tuple, self._rows))

    def _start(self, rank: int, work: Pass, now: float) -> None:
        self._rows[rank].append(work)
        kind = work.kind
        if kind.is_of_vocabulary:
            self._counts[rank][kind] += 1
        else:
            self._left[rank].remove(work)
        end = self._free[rank] = now + self._seconds(rank, work)
        self._look(end, rank)
        self._made[rank, work] = end
        if kind.is_of_vocabulary:
            parts = self._parts.setdefault((kind, work.microbatch), [])
            parts.append(end)
            if len(parts) == self._schedule.ranks:
                self._made[kind, work.microbatch] = there = max(self._parts.pop((kind, work.microbatch)))
                for other in range(self._schedule.ranks):
                    self._look(there + self._costs.exchange, other)
                    self._look(there + 2 * self._costs.exchange, other)
            return
        if kind is Kind.F and (rank, work.chunk) == self._last:
            self._synchronize(work.microbatch, end)
        if kind is Kind.F and (rank, work.chunk) == self._first:
            self._embedded += 1
            for other in range(self._schedule.ranks):  # may go on with IF
                self._look(now, other)
        home, stage = self._schedule.placement.home, self._schedule.placement.stage(rank, work.chunk)
        end_of_model, step = (self._last, 1) if kind is Kind.F else (self._first, -1)
        if (rank, work.chunk) == end_of_model:
            for other in range(self._schedule.ranks):
                self._look(end + self._costs.exchange, other)
        elif kind is Kind.F or kind.sends_gradient:
            self._look(end + self._costs.hop, home(stage + step)[0])

    def _synchronize(self, microbatch: int, made: float) -> None:
        """Interlaced, fix the moment at which all ranks run S, of which the last stage has made the output.

        Between two of them every rank has the time for its passes of one microbatch, so that none has to stand still.
        """
        if self._schedule.vocabulary is Vocabulary.INTERLACED:
            before = self._together[-1] + self._interval if self._together else 0.0
            self._together.append(max(made + self._costs.exchange, before))
            for rank in range(self._schedule.ranks):
                self._look(self._together[-1], rank)

    def _look(self, moment: float, rank: int) -> None:
        heapq.heappush(self._moments, (max(moment, self._free[rank]), rank))

    def _choose(self, rank: int, now: float) -> Pass | None:
        """What a free rank does now; None to wait."""
        blocking = self._schedule.vocabulary is not Vocabulary.ONE_BARRIER
        counts = self._counts[rank]
        if self._trains and self._schedule.vocabulary is Vocabulary.INTERLACED and counts[Kind.T] < counts[Kind.S]:
            return next(self._vocabulary(rank, now, Kind.T), None)
        urgent = (Kind.T, Kind.S, Kind.IF) if blocking else (Kind.S, Kind.IF)
        idle = (Kind.IB,) if blocking else (Kind.T, Kind.IB)
        for work in self._vocabulary(rank, now, *urgent):
            return work
        for work in self._vocabulary(rank, now, *idle):
            if self._ready(rank, work._replace(microbatch=work.microbatch + MOST_WAITING - 1), now):
                return work
        for work in self._stages(rank):
            if self._ready(rank, work, now) and self._fits(rank, work, now):
                return work
        return next((work for work in self._vocabulary(rank, now, *idle) if self._fits(rank, work, now)), None)

    def _stages(self, rank: int) -> Iterator[Pass]:
        """The rank's next pass of a stage; and if that is a forward that has to wait, the backward that comes first after it."""
        for work in self._left[rank]:
            yield work
            if work.kind is not Kind.F:
                return

    def _fits(self, rank: int, work: Pass, now: float) -> bool:
        """Whether a pass ends before all ranks have to run the next S together."""
        number = self._counts[rank][Kind.S]
        if number >= len(self._together):
            return True
        return now + self._seconds(rank, work) <= self._together[number] * (1 + 1e-9)

    def _seconds(self, rank: int, work: Pass) -> float:
        if work.kind.is_of_vocabulary:
            return self._costs.vocabulary.seconds(work.kind)
        return self._costs.stages[self._schedule.placement.stage(rank, work.chunk)].seconds(work.kind)

    def _vocabulary(self, rank: int, now: float, *kinds: Kind) -> Iterator[Pass]:
        """The next pass of each kind that the rank can run now."""
        for kind in kinds:
            work = Pass(kind, self._counts[rank][kind])
            if self._ready(rank, work, now):
                yield work

    def _ready(self, rank: int, work: Pass, now: float) -> bool:
        """Whether what a pass needs has arrived; for IF, whether there is room for what it makes."""
        if work.microbatch >= self._schedule.microbatches or not (self._trains or work.kind.is_forward):
            return False
        if work.kind is Kind.IF:
            return work.microbatch < self._embedded + MOST_WAITING
        if work.kind is Kind.S and work.microbatch < len(self._together) and now < self._together[work.microbatch]:
            return False
        return self._arrival(rank, work) <= now

    def _arrival(self, rank: int, work: Pass) -> float:
        """When the last thing that a pass needs is on its rank; infinite where nobody knows yet."""
        latest = 0.0
        for other, need in self._schedule.predecessors(rank, work):
            together = need.kind.is_of_vocabulary
            made = self._made.get((need.kind, need.microbatch) if together else (other, need), math.inf)
            latest = max(latest, made + delay(self._schedule, self._costs, rank, work, other, need))
            if together:
                break  # all others that a pass needs besides are parts of the same
        return latest
