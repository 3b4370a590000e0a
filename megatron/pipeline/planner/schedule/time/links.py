"""Rows that are replayed in simulated time: rows of passes, and what each pass waits for, makes and takes. The table of kinds
says all.

There is a row for every rank and, where passes run on lanes, one for every lane of a rank. In its rank's row such a pass takes no
time: it stands for the moment at which the lane may start it, or at which the rank waits for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import (
    COPY_LANES,
    REMOTE,
    STAGE_KINDS,
    VOCABULARY_KINDS,
    Flow,
    Lane,
    Where,
    needed_on_own_rank,
)
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.schedule import RankPasses, Schedule


class InLine(NamedTuple):
    """Messages of the passes of one kind, where they stand in line.

    Attributes:
        way: sender and receiver.
        seconds: by microbatch, for which the message occupies the link.
    """

    way: tuple[int, int]
    seconds: list[float]

    def enter(self, free: dict[tuple[int, int], float], microbatch: int, now: float) -> float:
        """When a message that is sent now has its turn.

        Args:
            free: by way, when the link is free; changed.
        """
        turn = max(now, free.get(self.way, now))
        free[self.way] = turn + self.seconds[microbatch]
        return turn


class PassLink(NamedTuple):
    """Needs and results of the passes of one kind on one rank and chunk.

    What passes make for each other has numbers, one after another for the microbatches: ``made + microbatch`` is made, and
    ``needed + microbatch`` is needed and arrives ``hop[microbatch]`` after it was made. ``seconds`` are by microbatch, too.
    """

    made: int
    needed: int
    hop: list[float]
    seconds: list[float]
    is_part: bool = False  # what is made is there once all ranks have made it
    line: InLine | None = None  # where it stands in line before it can travel


class Rows(NamedTuple):
    """Rows that are replayed.

    Attributes:
        passes: of every row; in the place of its kind, a pass has the key of its link.
        works: the passes that these stand for; None where a rank waits for its lane, and before a braid, where it waits for the
            gradient.
        links: by row, chunk and key.
        made_at: by number of what passes make for each other, when it is there: from the start (0), or not yet (None).
        lanes: the rows behind those of the ranks.
    """

    passes: Sequence[Sequence[Pass]]
    works: Sequence[Sequence[Pass | None]]
    links: list[list[dict[Any, PassLink]]]
    made_at: list[Any]
    lanes: list[LaneRow]


class LaneRow(NamedTuple):
    """The passes of one lane of a rank, in the order in which they run; what they take alone depends on R."""

    rank: int
    lane: Lane
    passes: Sequence[Pass]


def lane_rows(schedule: Schedule) -> list[LaneRow]:
    """All lanes that a schedule uses: both directions of every rank."""
    ranks = range(schedule.ranks if schedule.has_copies else 0)
    return [LaneRow(rank, lane, schedule.rows[rank].lanes.get(lane, [])) for rank in ranks for lane in COPY_LANES]


def rows_of(schedule: Schedule, costs: Costs | None, with_lanes: bool = False) -> Rows:
    """The rows of a schedule.

    Args:
        costs: without them nothing takes time.
        with_lanes: whether lanes have rows. Without them passes on lanes take no time, and nothing waits for them.
    """
    lanes = lane_rows(schedule) if costs and with_lanes else []
    table = _Table(schedule, costs, bool(lanes))
    made = [keyed(row, row.passes, row.awaited if lanes else {}) for row in schedule.rows]
    made += [keyed(schedule.rows[lane.rank], lane.passes, {}) for lane in lanes]
    passes, works = zip(*made, strict=True)
    links = [table.of_rank(rank) for rank in range(schedule.ranks)] + [table.of_lane(lane) for lane in lanes]
    return Rows(passes, works, links, table.made_at, lanes)


def keyed(row: RankPasses, passes: Sequence[Pass], awaited: Mapping[Pass, Pass]) -> tuple[Sequence[Pass], Sequence[Pass | None]]:
    """The passes of a row with their keys, and as they are (None for a wait that stands before a pass).

    The key of a wait for a lane is ("wait", kind of the pass on it); that of the wait before a braid is ("gradient", its kind).
    """
    if not awaited and not row.is_braided:
        return passes, passes
    braided = dict(row.braids())
    forwards = {after: work for work, after in braided.items()}
    keys: list[Pass] = []
    works: list[Pass | None] = []
    for work in passes:
        if (other := awaited.get(work)) is not None:
            key: Any = "wait", other.kind
            keys.append(Pass(key, *other[1:]))
            works.append(None)
        if (backward := braided.get(work)) is not None:
            key = "gradient", backward.kind
            keys += [Pass(key, *backward[1:]), Pass(_half(work, backward), *work[1:])]
            works += [None, work]
            continue
        if (forward := forwards.get(work)) is not None:
            keys.append(Pass(_half(work, forward), *work[1:]))
            works.append(work)
        else:
            keys.append(work)
            works.append(work)
    return keys, works


def _half(work: Pass, other: Pass) -> Any:
    """By what the link of one half of a braid is found: its kind, and the kind and chunk of the other half."""
    return work.kind, other.kind, other.chunk


class _Table:
    """The links of all rows, and the numbers of what passes make for each other.

    Numbers are given out in runs, one per microbatch. Those of the first run are there from the start, for passes that wait for
    nothing; no pass waits for those of the second run.
    """

    def __init__(self, schedule: Schedule, costs: Costs | None, has_lanes: bool) -> None:
        self._schedule, self._costs, self._has_lanes = schedule, costs, has_lanes
        self._stages, self._slices = schedule.placement.stages, schedule.slices
        self._begins: dict[Hashable, int] = {}
        self._nothing, self._unused = 0, self._slices
        self._braid = cache(costs.braid) if costs else None
        self._at_once: list[float] = [0] * self._slices
        self.made_at: list[Any] = [0] * self._slices + [None] * self._slices

    def of_rank(self, rank: int) -> list[dict[Any, PassLink]]:
        """By chunk and key, the links of a rank's row: of all kinds, for those who build one."""
        row = self._schedule.rows[rank]
        kinds = {*STAGE_KINDS, *(VOCABULARY_KINDS if self._schedule.vocabulary else ()), *row.kinds}
        links: list[dict[Any, PassLink]] = []
        for chunk in range(len(self._stages[rank])):
            links.append({kind: self._link(kind, rank, chunk) for kind in kinds})
            links[-1] |= {("wait", kind): self._wait(kind, rank, chunk) for kind in kinds if kind.row.starts_on_lane}
        for forward, backward in row.braids():
            self._add_braid(links, rank, forward, backward)
        return links

    def _add_braid(self, links: list[dict[Any, PassLink]], rank: int, forward: Pass, backward: Pass) -> None:
        """The links of a braid: the wait for what its backward needs, the time until its forward is over and its output leaves,
        and the rest."""
        first, second = _half(forward, backward), _half(backward, forward)
        if first not in links[forward.chunk]:
            whole, at_once = links[backward.chunk][backward.kind], self._at_once
            links[backward.chunk]["gradient", backward.kind] = whole._replace(
                made=self._unused, seconds=at_once, is_part=False, line=None
            )
            links[forward.chunk][first] = links[forward.chunk][forward.kind]._replace(seconds=[*at_once])
            links[backward.chunk][second] = whole._replace(needed=self._nothing, hop=at_once, seconds=[*at_once])
        if self._costs and self._braid:
            stages, numbers = self._stages[rank], (forward.microbatch, backward.microbatch)
            halves = links[forward.chunk][first].seconds, links[backward.chunk][second].seconds
            loads = numbers if self._costs.loads else (0, 0)
            seconds = self._braid(stages[forward.chunk], backward.kind, stages[backward.chunk], loads)
            for half, number, taken in zip(halves, numbers, seconds, strict=True):
                half[number] = taken

    def of_lane(self, lane: LaneRow) -> list[dict[Any, PassLink]]:
        """By chunk and key, the links of a lane's row."""
        links = [dict[Any, PassLink]() for _ in self._stages[lane.rank]]
        assert self._costs, "without costs there are no lanes"
        for work in lane.passes:
            kind, microbatch, chunk = work
            stage = self._stages[lane.rank][chunk]
            if kind not in links[chunk]:
                done = self._number(("done", kind), stage)
                name: Hashable = ("started", kind) if kind.row.starts else needed_on_own_rank(kind)
                links[chunk][kind] = PassLink(done, self._number(name, stage), self._at_once, [*self._at_once])
            recomputed = self._schedule.rows[lane.rank].has(Kind.R, work)
            links[chunk][kind].seconds[microbatch] = self._costs.of(microbatch).seconds(kind, stage, recomputed)
        return links

    def _wait(self, kind: Kind, rank: int, chunk: int) -> PassLink:
        """Link of the wait for a pass that has been started on a lane."""
        at_once = self._at_once
        return PassLink(self._unused, self._number(("done", kind), self._stages[rank][chunk]), at_once, at_once)

    def _link(self, kind: Kind, rank: int, chunk: int) -> PassLink:
        schedule, costs, stage = self._schedule, self._costs, self._stages[rank][chunk]
        made, needed, hop, seconds = self._unused, self._nothing, self._at_once, self._at_once
        if kind.row.lane:
            if not self._has_lanes:
                return PassLink(made, needed, hop, seconds)
            if kind.row.starts:
                return PassLink(self._number(("started", kind), stage), needed, hop, seconds)
            return PassLink(made, self._number(("done", kind), stage), hop, seconds)
        if costs:
            seconds = costs.seconds_of_each(kind, stage, self._slices)
        if kind in REMOTE:
            made = self._number(REMOTE[kind].kinds, None if kind.row.shard else stage, REMOTE[kind].ahead)
        for source in schedule.sources[kind, rank, chunk]:
            if source.need.where is not Where.SAME:  # what precedes a pass on its own rank is never late
                home, its_chunk = source.homes[0]
                its_stage = None if source.need.where is Where.ALL else self._stages[home][its_chunk]
                needed = self._number(source.kinds, its_stage, REMOTE[source.kinds[0]].ahead) - source.need.delay
                if costs:
                    hop = [
                        source.exchanges * each.exchange if source.exchanges else each.message(home, rank)
                        for each in costs.different(self._slices)
                    ] * (1 if costs.loads else self._slices)
        return PassLink(made, needed, hop, seconds, kind.row.shard and kind in REMOTE, self._line(kind, rank, stage))

    def _line(self, kind: Kind, rank: int, stage: int) -> InLine | None:
        """Line in which what a pass makes for a neighbouring stage waits, if it does."""
        placement, costs = self._schedule.placement, self._costs
        other = stage + (1 if kind.row.sends is Flow.ACTIVATION else -1)
        if not (costs and costs.in_line and kind.row.sends and 0 <= other < placement.depth):
            return None
        way = rank, placement.home(other)[0]
        return InLine(way, costs.each(lambda each: each.in_line[way], self._slices)) if way in costs.in_line else None

    def _number(self, name: Hashable, stage: int | None, ahead: int = 0) -> int:
        """Index at which the numbers of a result begin; those of ``ahead`` microbatches before the first are there from the
        start.
        """
        if (name, stage) not in self._begins:
            self._begins[name, stage] = len(self.made_at) + ahead
            self.made_at += [0] * ahead + [None] * self._slices
        return self._begins[name, stage]
