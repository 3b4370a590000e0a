"""Vocabulary parallelism: inserts the passes of a vocabulary that is sharded over all ranks into any schedule.

``delay_backwards`` gives every microbatch more time between its last F and its first B: one interval (the time in which every
rank works through one microbatch) for each barrier between the ranks. ``shard_vocabulary`` then puts the vocabulary's passes
where ranks have time. Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv 2411.05288), section 5:
every interval costs the memory of one microbatch more and adds no bubble.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import MOST_WAITING
from megatron.pipeline.planner.schedule.core.passes import VOCABULARY_KINDS, Kind, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.time.clock import Clock
from megatron.pipeline.planner.schedule.time.links import rows_of
from megatron.pipeline.planner.schedule.time.replay import Stuck, dependency_order


def postponed(vocabulary: Vocabulary | None, ranks: int) -> int:
    """By how many microbatches backwards are postponed, which is also how many more microbatches every rank holds.

    One for each barrier. Interlaced, where all ranks stop for the vocabulary of each microbatch, needs half as many as there
    are ranks (nnScaler's schedule; Yeung et al., section 6: 1.5 times the activations of 1F1B).
    """
    barriers = {Vocabulary.ONE_BARRIER: 1, Vocabulary.TWO_BARRIERS: 2, Vocabulary.INTERLACED: math.ceil(ranks / 2)}
    return barriers[vocabulary] if vocabulary else 0


def delay_backwards(schedule: Schedule, by: int) -> Schedule:
    """Delay every backward by the forwards of ``by`` more microbatches.

    If ranks interleave differently this can deadlock; then every backward takes the position of the backward ``by``
    microbatches later, which cannot.

    Either way the result obeys the rules that the schedule obeys, and no rank holds more than ``by`` microbatches more.
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
                # Every microbatch keeps its kinds: split or fused, recomputed or not.
                kinds: tuple[Kind, ...] = (Kind.W,) if work.kind is Kind.W else (Kind.R, Kind.B, Kind.BW)
                kinds += (Kind.W,) if work.kind is Kind.BW else ()
                earlier = (work._replace(kind=kind, microbatch=work.microbatch - by) for kind in kinds)
                for moved in filter(present.__contains__, earlier):
                    if moved.kind is Kind.BW:  # weight gradients are accumulated in microbatch order: earlier W come first
                        before = (moved._replace(kind=Kind.W, microbatch=number) for number in range(moved.microbatch))
                        row |= dict.fromkeys(filter(present.__contains__, before))
                    row[moved] = None
        rows.append((*row, *(work for work in passes if work not in row)))
    return replace(schedule, passes=tuple(rows))


def shard_vocabulary(schedule: Schedule, vocabulary: Vocabulary, costs: Costs) -> Schedule:
    """Insert S, T, IF and IB of every microbatch on every rank.

    Ranks are simulated through time. A free rank takes S first, because the last stage waits for S of all ranks (with two
    barriers also for T of all ranks); then IF, unless ``MOST_WAITING`` embeddings already wait for the first stage; then its
    next pass of a stage, or if that is a forward whose input is late, the first backward after it. T (with one barrier) and
    IB can wait, as W can: they run when the rank has nothing else to do, or when ``MOST_WAITING`` of them are due.

    Args:
        schedule: of stages' passes; ``delay_backwards`` has made room. It may consist of forwards only.
        costs: of the stages and of the vocabulary's passes.

    Raises:
        ValueError: the schedule cannot finish.
    """
    inserted = _Insertion(replace(schedule, vocabulary=vocabulary), costs)
    return replace(schedule, vocabulary=vocabulary, passes=inserted.run())


class _Insertion:
    """Choice of the pass that every rank runs next: one of a stage, in the schedule's order, or one of the vocabulary."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule, costs
        self._clock = Clock(schedule.ranks, rows_of(schedule, costs))
        self._remaining = [deque(passes) for passes in schedule.passes]  # passes of stages
        self._counts = [dict.fromkeys(VOCABULARY_KINDS, 0) for _ in schedule.passes]  # passes that ran, by rank
        self._trains = any(not work.kind.is_forward for work in schedule.passes[0])
        self._embedded = 0  # microbatches that the first stage has begun
        self._together: list[float] = []  # interlaced: when all ranks run S of each microbatch, as far as that is known
        placement = schedule.placement
        self._first, self._last = placement.home(0), placement.home(placement.last_stage)

    def run(self) -> tuple[tuple[Pass, ...], ...]:
        """The passes of all ranks.

        Raises:
            ValueError: some passes can never run.
        """
        self._clock.run(self._next)
        kinds = len(VOCABULARY_KINDS) if self._trains else 2
        remaining = sum(map(len, self._remaining)) + sum(
            kinds * self._schedule.microbatches - sum(counts.values()) for counts in self._counts
        )
        if remaining:
            raise ValueError(f"{self._schedule.name} cannot finish: {remaining} passes wait for each other")
        return tuple(map(tuple, self._clock.ends))

    def _next(self, rank: int, now: float) -> Sequence[Pass]:
        """Choose what a free rank runs now, and note it as run."""
        work = self._choose(rank, now)
        if work is None:
            return ()
        if work.kind.is_of_vocabulary:
            self._counts[rank][work.kind] += 1
            return (work,)
        self._remaining[rank].remove(work)
        if work.kind is Kind.F and (rank, work.chunk) == self._first:
            self._embedded += 1
            self._look_at_all(now)  # IF may go on
        if work.kind is Kind.F and (rank, work.chunk) == self._last:
            self._synchronize(now + self._clock.seconds(rank, work))
        return (work,)

    def _synchronize(self, end: float) -> None:
        """Interlaced: fix when all ranks run S of the microbatch whose last F ends then.

        Between two of these moments every rank has the time for its passes of one microbatch, so that no rank stands still.
        """
        if self._schedule.vocabulary is Vocabulary.INTERLACED:
            costs, rows = self._costs.of(len(self._together)), self._schedule.placement.stages
            spread = costs.vocabulary.total
            work = max(sum(costs.stages[stage].total for stage in row) + costs.stages[row[0]].pace * spread for row in rows)
            interval = work + costs.exchange
            before = self._together[-1] + interval if self._together else 0.0
            self._together.append(max(end + self._costs.exchange, before))
            self._look_at_all(self._together[-1])

    def _look_at_all(self, moment: float) -> None:
        for rank in range(self._schedule.ranks):
            self._clock.look(rank, moment)

    def _choose(self, rank: int, now: float) -> Pass | None:
        """Choose what a free rank does now; None to wait."""
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
        """The rank's next pass of a stage; if that is a forward, then the first backward after it, which may run before it."""
        chunks = set[int]()  # whose next forward may wait: a shorter one behind it may not run before it
        for work in self._remaining[rank]:
            if work.kind is not Kind.F or work.chunk not in chunks:
                yield work
            if work.kind is not Kind.F:
                return
            chunks.add(work.chunk)

    def _fits(self, rank: int, work: Pass, now: float) -> bool:
        """Tell whether a pass ends before all ranks have to run the next S together."""
        number = self._counts[rank][Kind.S]
        if number >= len(self._together):
            return True
        return now + self._clock.seconds(rank, work) <= self._together[number] * (1 + SLACK)

    def _vocabulary(self, rank: int, now: float, *kinds: Kind) -> Iterator[Pass]:
        """The next pass of each kind that the rank can run now."""
        for kind in kinds:
            work = Pass(kind, self._counts[rank][kind])
            if self._ready(rank, work, now):
                yield work

    def _ready(self, rank: int, work: Pass, now: float) -> bool:
        """Tell whether what a pass needs has arrived; for IF, whether there is room for what it makes."""
        if work.microbatch >= self._schedule.microbatches or not (self._trains or work.kind.is_forward):
            return False
        if work.kind is Kind.IF:
            return work.microbatch < self._embedded + MOST_WAITING
        if work.kind is Kind.S and work.microbatch < len(self._together) and now < self._together[work.microbatch]:
            return False
        if work.kind in (Kind.R, Kind.B, Kind.BW) and work._replace(kind=Kind.F) not in self._clock.ends[rank]:
            return False  # it comes after a forward that waits
        return self._clock.arrival(rank, work) <= now
