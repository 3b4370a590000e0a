"""An event-driven clock: rows (ranks and their lanes) choose what to run next, or follow an order, as time passes.

If the order of every row is given and durations do not depend on what else runs, ``replay`` finds the same times without
visiting the moments in order, several times as fast.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence

from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.time.lanes import Switch
from megatron.pipeline.planner.schedule.time.links import Rows


class Clock:
    """Simulated time of rows that run one pass at a time.

    Attributes:
        now: the current time.
        free: for each row, when its last pass ends.
        starts, ends: for each row, of its passes in the order in which they ran.
    """

    def __init__(self, ranks: int, rows: Rows, switches: Mapping[int, Switch] | None = None) -> None:
        """
        Args:
            ranks: how many of the rows are ranks; rows of copies follow.
            rows: their links are used, and what is there from the start.
            switches: by row, of rows whose passes take longer while others behind their switch run.
        """
        count = len(rows.links)
        self.now: float = 0
        self.free: list[float] = [0] * count
        self.starts: list[dict[Pass, float]] = [{} for _ in range(count)]
        self.ends: list[dict[Pass, float]] = [{} for _ in range(count)]
        self._ranks, self._links, self._made_at = ranks, rows.links, list(rows.made_at)
        self._switches = switches or {}
        self._lines: dict[tuple[int, int], float] = {}  # by way, when a link is free on which messages stand in line
        self._parts: dict[int, list[float]] = {}  # by number of a result that every rank has a part in: when parts were made
        self._blocked: dict[int, set[tuple[int, float]]] = {}  # by number of a result: (row that waits, seconds it travels there)
        self._moments: list[tuple[float, int]] = []  # a heap of (moment, row): when the row chooses, if it is free
        self._known: set[tuple[float, int]] = set()  # moments of the heap
        for row in range(count):
            self.look(row, 0)

    def look(self, row: int, moment: float) -> None:
        """Let a row choose at a moment, if it is free then."""
        if (look := (moment, row)) not in self._known:
            self._known.add(look)
            heapq.heappush(self._moments, look)

    def run(self, choose: Callable[[int, float], Sequence[Pass]]) -> None:
        """Let rows run until none chooses anything any more.

        Args:
            choose: from a free row and the time to the passes that it runs now, one directly after another; nothing to wait,
                until a result arrives that it has asked for (``arrival``), or a moment given to ``look``.
        """
        while self._moments:
            now, row = moment = heapq.heappop(self._moments)
            self._known.discard(moment)
            if self.free[row] > now:
                continue
            self.now = now
            if self._switches and row in self._switches and len(self.ends[row]) < len(self.starts[row]):
                self._end_copy(row, now)
            works = choose(row, now)
            if works:
                self._start(row, works, now)

    def arrival(self, row: int, work: Pass) -> float:
        """When the result of another row that a pass needs is there; infinite as long as that is not known."""
        _, needed, hop, *_ = self._links[row][work.chunk][work.kind]
        made = self._made_at[needed + work.microbatch]
        if made is None:
            self._blocked.setdefault(needed + work.microbatch, set()).add((row, hop[work.microbatch]))
            return math.inf
        arrived: float = made + hop[work.microbatch]
        if arrived > self.now:
            self.look(row, arrived)
        return arrived

    def seconds(self, row: int, work: Pass) -> float:
        return self._links[row][work.chunk][work.kind].seconds[work.microbatch]

    def _start(self, row: int, works: Sequence[Pass], now: float) -> None:
        links, starts, ends = self._links[row], self.starts[row], self.ends[row]
        elapsed: float = 0
        end = now
        for work in works:
            seconds = links[work.chunk][work.kind].seconds[work.microbatch]
            starts[work] = end
            if row in self._switches:
                self._change(row, now, seconds)
                return
            elapsed += seconds
            ends[work] = end = now + elapsed
        self.free[row] = end
        heapq.heappush(self._moments, (end, row))
        self._make(row, works[-1], end)

    def _end_copy(self, row: int, now: float) -> None:
        work = next(reversed(self.starts[row]))
        self.ends[row][work] = now
        self._make(row, work, now)
        self._change(row, now, None)

    def _change(self, row: int, now: float, seconds: float | None) -> None:
        for other, end in self._switches[row].change(now, row, seconds).items():
            self.free[other] = end
            self.look(other, end)

    def _make(self, row: int, work: Pass, end: float) -> None:
        """A pass ends, or is known to end then: the rows that wait for its result look once it has arrived."""
        made, _, _, _, is_part, line = self._links[row][work.chunk][work.kind]
        number = made + work.microbatch
        if is_part:
            parts = self._parts.setdefault(number, [])
            parts.append(end)
            if len(parts) < self._ranks:
                return
            end = max(parts)
        if line:
            end = line.enter(self._lines, work.microbatch, end)
        self._made_at[number] = end
        for other, hop in self._blocked.pop(number, ()):
            self.look(other, end + hop)

    def follow(self, orders: Sequence[Sequence[Pass]]) -> None:
        """Run every row's passes in the order given."""

        def following(row: int, now: float) -> Sequence[Pass]:
            passes, slot = orders[row], len(self.starts[row])
            return passes[slot : slot + 1] if slot < len(passes) and self.arrival(row, passes[slot]) <= now else ()

        self.run(following)
