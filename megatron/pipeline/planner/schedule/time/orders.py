"""Compiled replay of orders of the stages' passes: the search plans with it, and changes to a schedule are tried with it.

It knows five kinds of passes, in the order in which a microbatch meets them on a stage:

    PRE -> DOWN -> MID -> UP -> POST

DOWN travels from the first stage to the last and UP back; the others stay on their stage. Read forwards in time, a schedule has F
as DOWN, R as MID, B or BW as UP and W as POST. Read backwards it has W as PRE, B or BW as DOWN, R as MID and F as UP: so the code
that plans the start of an iteration also plans its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.pipeline.planner.schedule.core.compiled import compiled
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import STAGE_KINDS, Kind, Where
from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.core.timeline import Lengths
from megatron.pipeline.planner.schedule.time.replay import Stuck

_Row: TypeAlias = tuple[Pass, ...]
Array: TypeAlias = NDArray[Any]

PRE, DOWN, MID, UP, POST = range(5)
KINDS = 5
_KEPT = 4096  # rows whose arrays are kept: most rows are those of the order before


def slots(backwards: bool = False) -> dict[Kind, int]:
    """By kind of a stage, which of the five it is: DOWN or UP where it needs another stage, else MID or POST by its place."""
    found: dict[Kind, int] = {}
    for kind in STAGE_KINDS:
        needed = {need.where for need in kind.row.needs}
        stays = POST if UP in found.values() else MID
        found[kind] = DOWN if Where.PREVIOUS in needed else UP if Where.NEXT in needed else stays
    return {kind: POST - slot if backwards else slot for kind, slot in found.items()}


def hops_of(placement: Placement, each: Sequence[Costs], count: int, backwards: bool = False) -> Array:
    """Seconds until a pass has what the stage before (DOWN) or behind (UP) made, ``float[5, S, M]``; -1 where it needs nothing.

    Args:
        each: costs of every microbatch, or one where all are alike.
        count: M.
        backwards: whether time runs from the end to the start, so that messages go the other way.
    """
    hops = np.full((KINDS, placement.depth, count), -1.0)
    for stage in range(1, placement.depth):
        there, here = (placement.home(one)[0] for one in ((stage, stage - 1) if backwards else (stage - 1, stage)))
        hops[DOWN, stage] = [costs.message(there, here) for costs in each]
        hops[UP, stage - 1] = [costs.message(here, there) for costs in each]
    return hops


class BusyLinks(NamedTuple):
    """Links on which messages stand in line.

    Attributes:
        of: int[5, S], the number of the link over which a pass has what it needs; -1 where no message stands in line.
        seconds: float[5, S, M], for which that message occupies it.
        free: float[L], when each is free; of no length where there are none.
    """

    of: Array
    seconds: Array
    free: Array

    @staticmethod
    def between(placement: Placement, each: Sequence[Costs], count: int, backwards: bool = False) -> BusyLinks:
        """Those of a placement; arguments as of ``hops_of``."""
        ways = list(each[0].in_line)
        of, seconds = np.full((KINDS, placement.depth), -1), np.zeros((KINDS, placement.depth, count if ways else 0))
        for stage in range(1, placement.depth if ways else 0):
            way = tuple(placement.home(one)[0] for one in ((stage, stage - 1) if backwards else (stage - 1, stage)))
            for place, one in ((DOWN, stage), way), ((UP, stage - 1), way[::-1]):
                if one in ways:
                    of[place], seconds[place] = ways.index(one), [costs.in_line[one] for costs in each]
        return BusyLinks(of, seconds, np.zeros(len(ways)))

    def fresh(self, hops: Array) -> tuple[Array, BusyLinks]:
        """Hops that a replay may make longer by what messages stand in line, and the links, all free."""
        return (hops.copy(), self._replace(free=np.zeros(len(self.free)))) if len(self.free) else (hops, self)


@compiled
def enter(lines: Any, hops: Array, kind: int, stage: int, index: int, made: float) -> bool:
    """Add to a line what a pass of another stage needs and is made now: it arrives later by what it waits. Whether it waits."""
    line = lines.of[kind, stage]
    if line < 0:
        return False
    wait = max(0.0, lines.free[line] - made)
    lines.free[line] = made + wait + lines.seconds[kind, stage, index]
    hops[kind, stage, index] += wait
    return bool(wait > 0)


def can_be_compiled(schedule: Schedule) -> bool:
    """Tell whether all passes of a schedule run alone, and on the ranks."""
    return all(row.kinds <= frozenset(STAGE_KINDS) for row in schedule.rows)


class Orders:
    """Replays schedules on one placement at some costs, with the times of ``simulate``, bit for bit if no message waits."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        costs, slot = schedule.costs(costs), slots()
        self._tables = [
            {
                (kind, chunk): (slot[kind], stage, costs.seconds_of_each(kind, stage, schedule.slices))
                for kind in slot
                for chunk, stage in enumerate(stages)
            }
            for stages in schedule.placement.stages
        ]
        messages = schedule.placement, costs.different(schedule.slices), schedule.slices
        self._hops, self._lines = hops_of(*messages), BusyLinks.between(*messages)
        self._before = np.full(self._hops.shape[:2], -1)  # what precedes a pass on its own rank is never late
        self._ends, self._seconds = np.empty((2, *self._hops.shape))
        self._known: list[dict[int, tuple[_Row, Array, Array]]] = [{} for _ in schedule.passes]

    def lengths(self, schedule: Schedule) -> Lengths:
        """Those of a schedule for which ``can_be_compiled``, and in which each pass stands behind what it needs of its rank.

        Raises:
            Stuck: ranks would wait for each other for ever.
        """
        lengths = np.array([len(row) for row in schedule.passes])
        order = np.zeros((len(lengths), lengths.max(), 3), np.int32)
        ends, seconds = self._ends, self._seconds  # what another schedule has left there is not read
        for rank, row in enumerate(schedule.passes):
            order[rank, : len(row)], taken = self._row(rank, row)
            seconds[tuple(order[rank, : len(row)].T)] = taken
        span, makespan = replay(order, lengths, seconds, self._before, ends, *self._lines.fresh(self._hops))
        if span < 0:
            work = schedule.passes[0][0]
            raise Stuck(0, work, (0, work))
        return Lengths(span, makespan, math.fsum(ends[ends >= 0].tolist()))

    def _row(self, rank: int, row: _Row) -> tuple[Array, Array]:
        """Kind, stage, microbatch and seconds of every pass."""
        known, table = self._known[rank], self._tables[rank]
        if (found := known.get(id(row))) is None:
            made = [table[kind, chunk] for kind, _, chunk in row]
            passes = [(slot, stage, work.microbatch) for (slot, stage, _), work in zip(made, row, strict=True)]
            if len(known) * len(self._known) > _KEPT:
                known.clear()
            seconds = np.array([each[2][work.microbatch] for each, work in zip(made, row, strict=True)], dtype=float)
            # With the row, so that no other gets its id.
            found = known[id(row)] = row, np.array(passes, np.int32).reshape(-1, 3), seconds
        return found[1:]


class Reordered:
    """Replays one schedule with its microbatches in other orders.

    Args:
        schedule: of whole microbatches on one model, for which ``can_be_compiled``.
    """

    def __init__(self, schedule: Schedule, problem: Problem) -> None:
        costs, placement, slot, count = schedule.costs(problem.costs), schedule.placement, slots(), schedule.microbatches
        kinds = [kind for kind in STAGE_KINDS if any(kind in row.kinds for row in schedule.rows)]
        stages = range(len(costs.stages))

        def changes(kind: Kind, stage: int) -> list[float]:
            return costs.each(lambda each: each.allocated(kind, stage, stage in problem.recompute), count)

        self._seconds = np.array([[costs.seconds_of_each(kind, stage, count) for stage in stages] for kind in kinds], float)
        self._changes = np.array([[changes(kind, stage) for stage in stages] for kind in kinds], float)
        messages = placement, costs.different(count), count
        self._hops, self._lines = hops_of(*messages), BusyLinks.between(*messages)
        self._before = np.full(self._hops.shape[:2], -1)
        self._lengths = np.array(list(map(len, schedule.passes)))
        self._order = np.zeros((len(self._lengths), self._lengths.max(), 3), np.int32)
        self._filled = np.arange(self._order.shape[1]) < self._lengths[:, None]
        number = {kind: place for place, kind in enumerate(kinds)}
        passes = [
            (number[kind], slot[kind], placement.stages[rank][chunk], microbatch)
            for rank, row in enumerate(schedule.passes)
            for kind, microbatch, chunk in row
        ]
        self._kind, its_slot, self._stage, self._place = np.array(passes).T
        self._order[self._filled] = np.stack((its_slot, self._stage, self._place), axis=1)
        self._at = its_slot, self._stage, self._place
        self._taken, self._ends = np.zeros((2, *self._hops.shape))
        self._held, self._limits = np.zeros(self._filled.shape), problem.limits and np.array(problem.limits) * (1 + SLACK)
        self.size = len(passes)

    def lengths(self, order: Array) -> tuple[Lengths, float]:
        """Those with microbatch ``order[k]`` in the place of the k-th, and how many times their limits ranks hold at most; at
        least 1."""
        which, excess = (self._kind, self._stage, order[self._place]), 1.0
        if self._limits is not None:
            self._held[self._filled] = self._changes[which]
            excess = max(excess, float((self._held.cumsum(axis=1).max(axis=1) / self._limits).max()))
        self._taken[self._at] = self._seconds[which]
        hops, lines = self._lines.fresh(np.take(self._hops, order, axis=2))
        if len(lines.free):
            lines = lines._replace(seconds=np.take(lines.seconds, order, axis=2))
        span, makespan = replay(self._order, self._lengths, self._taken, self._before, self._ends, hops, lines)
        return Lengths(span, makespan, 0.0), excess


def replay(
    order: Array, lengths: Array, seconds: Array, before: Array, ends: Array, hops: Array, lines: BusyLinks
) -> tuple[float, float]:
    """Fill ``ends`` with the earliest times at which passes end; returns (span, makespan), or -1 if some can never run.

    Args:
        order: int[P, N, 3], the (kind, stage, microbatch) of every rank's passes.
        lengths: int[P], how many of the N a rank has.
        seconds: float[5, S, M], of these passes.
        before: int[5, S], the kind that must precede on the stage; negative if none must.
        ends: float[5, S, M]; -1 for passes that are not in the order.
        hops, lines: from ``BusyLinks.fresh``; of ``hops_of``.
    """
    rows = _RowClocks(order, lengths, np.zeros(len(lengths), np.int64), *np.zeros((2, len(lengths))))
    ends.fill(-1.0)
    if not _replay(rows, seconds, hops, before, ends, lines):
        return -1.0, -1.0
    return float((rows.free - rows.begun).max()), float(rows.free.max())


class _RowClocks(NamedTuple):
    """Ranks' passes, and for every rank how far it came, and when it begins and is free."""

    order: Array
    lengths: Array
    position: Array
    begun: Array
    free: Array


@compiled
def _replay(rows: Any, seconds: Array, hops: Array, before: Array, ends: Array, lines: Any) -> bool:
    """Fill ``ends``, and what is said of every rank; returns whether all came to the end."""
    order, lengths, position, begun, free = rows
    ranks = lengths.shape[0]
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while position[rank] < lengths[rank]:
                kind, stage, index = order[rank, position[rank]]
                start = free[rank]
                if before[kind, stage] >= 0 and ends[before[kind, stage], stage, index] < 0:
                    break
                # No function for what ``engine`` and ``compact`` need too: a call counts references to arrays, and takes longer.
                if hops[kind, stage, index] >= 0:
                    made = ends[kind, stage - 1 if kind == DOWN else stage + 1, index]
                    if made < 0:
                        break
                    start = max(start, made + hops[kind, stage, index])
                if position[rank] == 0:
                    begun[rank] = start
                free[rank] = start + seconds[kind, stage, index]
                ends[kind, stage, index] = free[rank]
                neighbour = stage + (kind == DOWN) - (kind == UP)
                if lines.free.shape[0] > 0 and neighbour != stage and 0 <= neighbour < ends.shape[1]:
                    enter(lines, hops, kind, neighbour, index, free[rank])
                position[rank] += 1
                moved = True
    for rank in range(ranks):  # noqa: SIM110 - numba has no all()
        if position[rank] < lengths[rank]:
            return False
    return True
