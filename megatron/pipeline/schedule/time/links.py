"""What is replayed in simulated time: rows of passes, and what each pass waits for, makes and takes. The table of kinds says all.

There is a row for every rank and, where passes run on lanes, one for every lane of a rank. In its rank's row such a pass takes no
time: it stands for the moment at which the lane may start it, or at which the rank waits for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.kinds import COPY_LANES, REMOTE, Lane, Where, kinds_of
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.schedule import RankPasses, Schedule


class Link(NamedTuple):
    """What the passes of one kind on one rank and chunk wait for and make.

    What passes make for each other has numbers, one after another for the microbatches: ``made + microbatch`` is made, and
    ``needed + microbatch`` is needed and arrives ``hop`` after it was made.
    """

    made: int
    needed: int
    hop: float
    seconds: float
    is_part: bool = False  # what is made is there once all ranks have made it


class Rows(NamedTuple):
    """What is replayed.

    Attributes:
        passes: of every row; the kind of a pass is a key of its row's links.
        works: the passes that these stand for; None where a rank waits for its lane.
        links: by row, chunk and key.
        size: how many numbers there are for what passes make for each other.
        ready: the numbers of what is there from the start.
        lanes: what the rows behind those of the ranks are.
    """

    passes: Sequence[Sequence[tuple[Any, int, int, int]]]
    works: Sequence[Sequence[Pass | None]]
    links: list[list[dict[Any, Link]]]
    size: int
    ready: list[int]
    lanes: list[LaneRow]


class LaneRow(NamedTuple):
    """The passes of one lane of a rank, in the order in which they run, with the seconds that each takes alone."""

    rank: int
    lane: Lane
    passes: tuple[Pass, ...]
    seconds: list[float]


def lane_rows(schedule: Schedule, costs: Costs) -> list[LaneRow]:
    """All lanes that a schedule uses, rank by rank; of a rank's copies always both directions."""
    used = {kind.row.lane for row in schedule.rows for kind in row.kinds if kind.row.lane}
    lanes = [lane for lane in Lane if lane in used or (schedule.has_copies and lane in COPY_LANES)]
    found = []
    for rank, row in enumerate(schedule.rows):
        stages = schedule.placement.stages[rank]
        for lane in lanes:
            passes = row.on_lane(lane)
            seconds = [costs.seconds(work.kind, stages[work.chunk], row.has(Kind.R, work)) / row.parts(work) for work in passes]
            found.append(LaneRow(rank, lane, passes, seconds))
    return found


def rows_of(schedule: Schedule, costs: Costs | None, lanes: Sequence[LaneRow] = ()) -> Rows:
    """The rows of a schedule.

    Args:
        costs: without them nothing takes time.
        lanes: those to follow. Without them passes on lanes take no time, and nothing waits for them.
    """
    table = _Table(schedule, costs, bool(lanes))
    rows: list[Sequence[tuple[Any, int, int, int]]] = []
    works: list[Sequence[Pass | None]] = []
    for row in schedule.rows:
        if not lanes and not row.is_divided:
            rows.append(row.passes)
            works.append(row.passes)
            continue
        waits = row.awaited if lanes else {}
        mine = [one for work in row.passes for one in (*((other, True) for other in waits.get(work, ())), (work, False))]
        rows.append([(_key(row, work, waits), *work[1:]) for work, waits in mine])
        works.append([None if waits else work for work, waits in mine])
    for lane in lanes:
        row = schedule.rows[lane.rank]
        rows.append([(_key(row, work), *work[1:]) for work in lane.passes] if row.is_divided else lane.passes)
        works.append(lane.passes)
    links = [table.of_rank(rank) for rank in range(schedule.ranks)] + [table.of_lane(lane) for lane in lanes]
    return Rows(rows, works, links, table.size, table.ready, list(lanes))


def _key(row: RankPasses, work: Pass, waits: bool = False) -> Hashable:
    """By what the link of a pass is found, or of the wait for it."""
    kind = work.kind
    divided = (kind, work.part, row.parts(work)) if row.is_divided else kind
    return ("wait", divided) if waits else divided


class _Table:
    """The links of all rows, and the numbers of what passes make for each other.

    Numbers are given out in runs, one per microbatch. Those of the first run are there from the start, for passes
    that wait for nothing; no pass waits for those of the second run.
    """

    def __init__(self, schedule: Schedule, costs: Costs | None, has_lanes: bool) -> None:
        self._schedule, self._costs, self._has_lanes = schedule, costs, has_lanes
        self._stages, self._slices = schedule.placement.stages, schedule.slices
        self._begins: dict[Hashable, int] = {}
        self._nothing, self._unused, self.size = 0, self._slices, 2 * self._slices
        self.ready = list(range(self._slices))

    def of_rank(self, rank: int) -> list[dict[Any, Link]]:
        """By chunk and key, the links of a rank's row."""
        row = self._schedule.rows[rank]
        if not row.is_divided and not self._has_lanes:
            return [{kind: self._link(kind, rank, chunk) for kind in row.kinds} for chunk in range(len(self._stages[rank]))]
        links: list[dict[Any, Link]] = [{} for _ in self._stages[rank]]
        for work in row.passes:
            key = _key(row, work)
            if key not in links[work.chunk]:
                links[work.chunk][key] = self._link(work.kind, rank, work.chunk, work.part, row.parts(work))
                if work.kind.row.starts_on_lane:
                    done = self._number(("done", work.kind, work.part), self._stages[rank][work.chunk])
                    links[work.chunk][_key(row, work, waits=True)] = Link(self._unused, done, 0, 0)
        return links

    def of_lane(self, lane: LaneRow) -> list[dict[Any, Link]]:
        """By chunk and key, the links of a lane's row."""
        row = self._schedule.rows[lane.rank]
        links: list[dict[Any, Link]] = [{} for _ in self._stages[lane.rank]]
        for work in lane.passes:
            key, stage = _key(row, work), self._stages[lane.rank][work.chunk]
            if key not in links[work.chunk]:
                done = self._number(("done", work.kind, work.part), stage)
                if work.kind.row.starts:
                    needed = self._number(("started", work.kind, work.part), stage)
                else:
                    needed = self._number(kinds_of(work.kind.row.needs[0]), stage)
                links[work.chunk][key] = Link(done, needed, 0, 0)
        return links

    def _link(self, kind: Kind, rank: int, chunk: int, part: int = 0, parts: int = 1) -> Link:
        schedule, costs, stage = self._schedule, self._costs, self._stages[rank][chunk]
        if kind.row.lane:
            if not self._has_lanes:
                return Link(self._unused, self._nothing, 0, 0)
            if kind.row.starts:
                return Link(self._number(("started", kind, part), stage), self._nothing, 0, 0)
            return Link(self._unused, self._number(("done", kind, part), stage), 0, 0)
        seconds = costs.seconds(kind, stage) / parts if costs and parts > 1 else costs.seconds(kind, stage) if costs else 0
        made, needed, hop = self._unused, self._nothing, 0.0
        if kind in REMOTE and part == parts - 1:
            made = self._number(REMOTE[kind].kinds, None if kind.row.shard else stage, REMOTE[kind].ahead)
        for source in schedule.sources[kind, rank, chunk] if not part else ():
            if source.need.where is not Where.SAME:  # what precedes a pass on its own rank is never late
                home, its_chunk = source.homes[0]
                its_stage = None if source.need.where is Where.ALL else self._stages[home][its_chunk]
                needed = self._number(source.kinds, its_stage, REMOTE[source.kinds[0]].ahead) - source.need.delay
                hop = source.hops * costs.hop + source.exchanges * costs.exchange if costs else 0
        return Link(made, needed, hop, seconds, is_part=kind.row.shard and kind in REMOTE)

    def _number(self, name: Hashable, stage: int | None, ahead: int = 0) -> int:
        """Where the numbers of a result begin; those of ``ahead`` microbatches before the first are there from the start."""
        if (name, stage) not in self._begins:
            self.ready += range(self.size, self.size + ahead)
            self._begins[name, stage] = self.size + ahead
            self.size += ahead + self._slices
        return self._begins[name, stage]
