"""Iterations one after another, with what ranks do between them, until they are steady: the period, and when everything runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from megatron.pipeline.planner.schedule.core.boundary import Turn, buckets, first_and_last, within
from megatron.pipeline.planner.schedule.core.compiled import compiled
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import BUCKET_KINDS
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.schedule import RankPasses, Schedule, ScheduleError
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.time.links import keyed, rows_of
from megatron.pipeline.planner.schedule.time.orders import Array

_MOST = 64  # iterations: ranks that still drift apart by then are averaged over the later half


class Steady(NamedTuple):
    """Steady training: the seconds from an iteration's start to the next one's, and the sum of the moments, from the start of an
    iteration, at which its results are there, which tells equal periods apart."""

    period: float
    ends: float


class _Node(NamedTuple):
    """A step of a row: it starts once its row is free, and ``hop`` after the result ``need`` of this iteration (``lag`` 0) or of
    the one before (1) is there; then it makes the result ``made``, perhaps as one of all ranks' parts. -1 for no result."""

    need: int = -1
    lag: int = 0
    hop: float = 0.0
    seconds: float = 0.0
    made: int = -1
    part: bool = False


class Cycle:
    """Simulates schedules of one placement that have the same passes, in the orders and with the boundaries that are given.

    A rank's next iteration begins as soon as its own passes can; copies to host memory do not slow each other here.

    Args:
        schedule: one of them.
        costs: of its passes, and of its buckets.
        waits_for_norm: whether no rank steps before the norm of all gradients is known.
    """

    def __init__(self, schedule: Schedule, costs: Costs, waits_for_norm: bool) -> None:
        self._placement, self._costs, self._waits = schedule.placement, schedule.costs(costs), waits_for_norm
        self._rows = rows_of(schedule, self._costs, with_lanes=True)
        self._first = 2 * schedule.slices  # before are results that nothing needs
        self._numbers: dict[Hashable, int] = {}
        self._known: list[dict[Turn, tuple[Any, Any]]] = [{} for _ in range(schedule.ranks)]
        self._copies = [
            self._arrays([(self._link(row, key), work) for key, work in zip(passes, works, strict=True)])
            for row, (passes, works) in enumerate(zip(self._rows.passes, self._rows.works, strict=True))
            if row >= schedule.ranks
        ]

    def steady(self, made: Sequence[Turn]) -> Steady | None:
        """The period of ranks that repeat these turns; None where they would wait for each other for ever."""
        return None if (found := self._run(made)) is None else found[0]

    def timeline(self, made: Sequence[Turn]) -> Timeline:
        """Two iterations of steady training, from the first pass of the first.

        Raises:
            ScheduleError: ranks would wait for each other for ever.
        """
        found = self._run(made)
        if found is None:
            raise ScheduleError("with this boundary ranks wait for each other for ever: plan it anew")
        ranks, rows = len(made), self._of(made)
        timed: list[list[Timed]] = [[] for _ in rows]
        begin = float(found[1][0][0][:ranks, 0].min())
        for starts, ends in found[1]:
            for row, (_, works) in enumerate(rows):
                for work, steps in groupby(range(len(works)), works.__getitem__):
                    if work is not None:
                        slots = list(steps)
                        timed[row].append(Timed(work, float(starts[row, slots[0]] - begin), float(ends[row, slots[-1]] - begin)))
        lanes: list[list[Timed]] = timed[ranks : 2 * ranks]
        for lane, copies in zip(self._rows.lanes, timed[2 * ranks :], strict=True):
            lanes[lane.rank] = sorted(lanes[lane.rank] + copies, key=lambda each: each.start)
        without = [[each for each in row if not each.work.kind.row.lane] for row in timed[:ranks]]
        return Timeline(tuple(map(tuple, without)), tuple(map(tuple, lanes)))

    def _run(self, made: Sequence[Turn]) -> tuple[Steady, list[tuple[Array, Array]]] | None:
        """The steady state, and the starts and ends of the last two iterations."""
        rows = [arrays for arrays, _ in self._of(made)]
        lengths = np.array([arrays[0].shape[1] for arrays in rows], np.int64)
        whole, real = (np.zeros((kind, len(rows), lengths.max()), kind_) for kind, kind_ in ((4, np.int64), (2, float)))
        for row, (integers, floats) in enumerate(rows):
            whole[:, row, : lengths[row]], real[:, row, : lengths[row]] = integers, floats
        count = len(self._rows.made_at) + len(self._numbers)
        before, free, fronts = np.zeros(count), np.zeros(len(rows)), [0.0]
        times: list[tuple[Array, Array]] = []
        for _ in range(_MOST):
            now, parts, (starts, ends) = np.full(count, -1.0), np.zeros((2, count)), np.zeros((2, *whole.shape[1:]))
            turn = _Times(now, before, parts, np.zeros(len(rows), np.int64), free, starts, ends)
            if not _turn(_Steps(whole, real, lengths, len(made)), turn):
                return None
            times = [*times[-1:], (starts, ends)]
            there = now >= 0
            steps = now[there] - before[there]
            fronts.append(float(free.max()))
            before = now
            if len(fronts) > 2 and steps.max() - steps.min() <= SLACK * fronts[-1]:
                period = float(steps.max())
                break
        else:
            half = len(fronts) // 2
            period = (fronts[-1] - fronts[half]) / (len(fronts) - 1 - half)
        begin = starts[: len(made), 0].min()
        return Steady(period, math.fsum((now[there] - begin).tolist())), times

    def _of(self, made: Sequence[Turn]) -> list[tuple[Any, Any]]:
        """The arrays and works of all rows: of ranks, of their lanes between replicas, and of copies."""
        both = []
        for rank, (own, known) in enumerate(zip(made, self._known, strict=True)):
            if own not in known:
                known[own] = self._arrays(self._rank(rank, own)), self._arrays(self._lane(rank, own))
            both.append(known[own])
        return [first for first, _ in both] + [second for _, second in both] + self._copies

    @staticmethod
    def _arrays(nodes: Sequence[tuple[_Node, Pass | None]]) -> tuple[Any, Any]:
        of = [node for node, _ in nodes]
        integers = np.array([[node.need, node.lag, node.made, node.part] for node in of], np.int64).reshape(-1, 4).T
        floats = np.array([[node.hop, node.seconds] for node in of], float).reshape(-1, 2).T
        return (integers, floats), [work for _, work in nodes]

    def _number(self, *name: Hashable) -> int:
        """Index of a result between iterations."""
        return len(self._rows.made_at) + self._numbers.setdefault(name, len(self._numbers))

    def _link(self, row: int, key: Pass) -> _Node:
        link, number = self._rows.links[row][key.chunk][key.kind], key.microbatch
        need = link.needed + number
        there, unused = self._rows.made_at[need] is not None, link.made < self._first
        made = -1 if unused else link.made + number
        return _Node(-1 if there else need, 0, link.hop[number], link.seconds[number], made, link.is_part)

    def _rank(self, rank: int, own: Turn) -> list[tuple[_Node, Pass | None]]:
        """The steps of a rank: those of its passes, and between them the starts of RS and AG, waits for these and the norm, and
        OPT."""
        passes = RankPasses(tuple(work for work in own.passes if not work.kind.row.bucket))
        base = iter(zip(*keyed(passes, passes.passes, passes.awaited if self._rows.lanes else {}), strict=True))
        until, placed = own.late, list(enumerate(own.passes))
        # From its own boundary on: the first OPT waits for the norm.
        lags = {work: int(slot >= until) for slot, work in placed[until:] + placed[:until] if work.kind.row.bucket}
        first_step = next((work for work in lags if work.kind is Kind.OPT), None)
        whole, beside = {slot for places in first_and_last(own.passes) for slot in places.values()}, within(own.passes)
        nodes: list[tuple[_Node, Pass | None]] = []
        seconds = self._seconds(rank, own)
        for slot, work in placed:
            late = int(slot < until)
            if work.kind is Kind.OPT:
                if self._waits and work == first_step:
                    nodes.append((_Node(self._number("norm"), late, self._costs.norm), None))
                reduced = self._number(rank, work._replace(kind=Kind.RS))
                nodes.append((_Node(reduced, late, seconds=seconds[work.kind, work.chunk]), work))
            elif work.kind.row.bucket:
                nodes += [(_Node(made=self._number("start", rank, work)), None)] if work not in beside else []
            else:
                for key, each in base:
                    nodes.append((self._link(rank, key), each))
                    if each == work:
                        break
                if slot in whole:
                    nodes[-1:] = [(node, work) for node in self._by_bucket(rank, work, nodes[-1][0], lags, beside)]
        return nodes

    def _by_bucket(self, rank: int, work: Pass, whole: _Node, lags: dict[Pass, int], beside: set[Pass]) -> Iterator[_Node]:
        """The steps of a pass that takes the buckets of its chunk as they are gathered, or completes one after another.

        Args:
            whole: the pass as one step.
            lags: of all RS, OPT and AG of the rank, whether they are of the iteration before.
            beside: those that begin within a pass.
        """
        kind, step = (Kind.AG, 1) if work.kind.is_forward else (Kind.RS, -1)
        of_chunk = sorted(each for each in lags if each[::2] == (kind, work.chunk))[::step]
        begins = [_Node(made=self._number("start", rank, each)) if each in beside else _Node() for each in of_chunk]
        share = _Node(seconds=whole.seconds / max(1, len(of_chunk)))
        yield whole._replace(seconds=0.0 if of_chunk else whole.seconds, made=-1)
        if kind is Kind.AG:
            yield from begins
            yield from (share._replace(need=self._number(rank, each), lag=lags[each]) for each in of_chunk)
        else:
            for begin in begins:
                yield from (share, begin)
        yield _Node(made=whole.made, part=whole.part)

    def _lane(self, rank: int, own: Turn) -> list[tuple[_Node, Pass | None]]:
        """The steps of a rank's lane; the rank's part of the norm follows its last RS."""
        nodes: list[tuple[_Node, Pass | None]] = []
        seconds = self._seconds(rank, own)
        left = sum(work.kind is Kind.RS for work in own.passes)
        for work in own.passes:
            if work.kind.row.bucket and work.kind.row.lane:
                start, done = self._number("start", rank, work), self._number(rank, work)
                nodes.append((_Node(start, seconds=seconds[work.kind, work.chunk], made=done), work))
                left -= work.kind is Kind.RS
                if work.kind is Kind.RS and not left:
                    nodes.append((_Node(made=self._number("norm"), part=True), None))
        return nodes

    def _seconds(self, rank: int, own: Turn) -> dict[tuple[Kind, int], float]:
        """Seconds of a bucket, by kind and chunk."""
        stages, counts = self._placement.stages[rank], buckets(own.passes)
        found = {(kind, chunk): (stages[chunk], count) for chunk, count in counts.items() for kind in BUCKET_KINDS}
        return {key: self._costs.bucket_seconds(key[0], *of) for key, of in found.items()}


class _Steps(NamedTuple):
    """Steps of R rows.

    Attributes:
        whole: int[4, R, N], of every step its need, lag, what it makes, and whether that is a part.
        real: float[2, R, N], its hop and its seconds.
        lengths: int[R], steps of every row.
        ranks: how many parts make a result.
    """

    whole: Array
    real: Array
    lengths: Array
    ranks: int


class _Times(NamedTuple):
    """Times of one iteration.

    Attributes:
        now, before: float[..], when results of this iteration and of the one before are there; negative for not yet.
        parts: float[2, ..], how many parts of a result there are, and when the last was made.
        position: int[R], how many steps of a row are done.
        free: float[R], when every row is free.
        starts, ends: float[R, N].
    """

    now: Array
    before: Array
    parts: Array
    position: Array
    free: Array
    starts: Array
    ends: Array


@compiled
def _turn(steps: Any, times: Any) -> bool:
    """Run every row once, and fill in its times; returns whether all came to their ends."""
    whole, real, lengths, ranks = steps
    now, before, parts, position, free, starts, ends = times
    moved = True
    while moved:
        moved = False
        for row in range(lengths.shape[0]):
            while position[row] < lengths[row]:
                slot = position[row]
                need, start = whole[0, row, slot], free[row]
                if need >= 0:
                    there = before[need] if whole[1, row, slot] else now[need]
                    if there < 0:
                        break
                    start = max(start, there + real[0, row, slot])
                free[row] = start + real[1, row, slot]
                starts[row, slot], ends[row, slot] = start, free[row]
                made = whole[2, row, slot]
                if made >= 0:
                    if whole[3, row, slot]:
                        parts[0, made] += 1.0
                        parts[1, made] = max(parts[1, made], free[row])
                        if parts[0, made] == ranks:
                            now[made] = parts[1, made]
                    else:
                        now[made] = free[row]
                position[row] += 1
                moved = True
    for row in range(lengths.shape[0]):  # noqa: SIM110 - numba has no all()
        if position[row] < lengths[row]:
            return False
    return True
