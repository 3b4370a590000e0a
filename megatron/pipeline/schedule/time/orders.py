"""Compiled replay of many orders of the same passes: what trials of changes to a schedule are compared by."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.pipeline.schedule.core.compiled import compiled
from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.kinds import STAGE_KINDS, Kind
from megatron.pipeline.schedule.core.passes import Pass
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.core.timeline import Lengths
from megatron.pipeline.schedule.time.links import rows_of
from megatron.pipeline.schedule.time.replay import Stuck

_Row: TypeAlias = tuple[Pass, ...]
Array: TypeAlias = NDArray[Any]
_KEPT = 4096  # rows whose arrays are kept: most rows are those of the order before


def can_be_compiled(schedule: Schedule) -> bool:
    """Whether all passes of a schedule run alone, and on the ranks."""
    return all(row.kinds <= _KINDS and not row.is_divided for row in schedule.rows)


_KINDS = frozenset(STAGE_KINDS)


class Orders:
    """Replays schedules on one placement at some costs, with the times of ``simulate``, bit for bit."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        rows = rows_of(schedule, costs.sliced(schedule.splits))
        self._tables: list[dict[tuple[Kind, int], tuple[float, ...]]] = [
            {(kind, chunk): link[:4] for chunk, links in enumerate(chunks) for kind, link in links.items()}
            for chunks in rows.links
        ]
        self._made_at = np.full(rows.size, -1.0)
        self._made_at[rows.ready] = 0.0
        self._known: list[dict[int, tuple[_Row, Array]]] = [{} for _ in rows.links]

    def lengths(self, schedule: Schedule) -> Lengths:
        """Those of a schedule for which ``can_be_compiled``, and in which each pass stands behind what it needs of its rank.

        Raises:
            Stuck: ranks would wait for each other for ever.
        """
        rows = [self._row(rank, row) for rank, row in enumerate(schedule.passes)]
        first = np.cumsum([0, *map(len, rows)])
        ends = np.empty(int(first[-1]))
        span, makespan = _replay(np.concatenate(rows), first, self._made_at.copy(), ends)
        if span < 0:
            work = schedule.passes[0][0]
            raise Stuck(0, work, (0, work))
        return Lengths(span, makespan, math.fsum(ends.tolist()))

    def _row(self, rank: int, row: _Row) -> Array:
        """Of every pass: the number of what it makes and of what it needs, the hop of that, and its seconds."""
        known, table = self._known[rank], self._tables[rank]
        if (found := known.get(id(row))) is not None:
            return found[1]
        array = np.array([table[kind, chunk] for kind, _, chunk, _ in row]).reshape(-1, 4)
        array[:, :2] += np.array([work[1] for work in row], dtype=float)[:, None]
        if len(known) * len(self._known) > _KEPT:
            known.clear()
        known[id(row)] = row, array  # with the row, so that no other gets its id
        return array


@compiled
def _replay(passes: Array, first: Array, made_at: Array, ends: Array) -> tuple[float, float]:
    """Fill ``ends``; returns (span, makespan), or -1 if some passes can never run.

    Args:
        passes: float[N, 4], see ``Orders``; those of rank r are ``passes[first[r]:first[r + 1]]``.
        made_at: when every result was made, -1 where it is not yet.
    """
    ranks = first.shape[0] - 1
    position = first[:-1].copy()
    free, begun = np.zeros(ranks), np.zeros(ranks)
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            now = free[rank]
            while position[rank] < first[rank + 1]:
                at = position[rank]
                ready = made_at[int(passes[at, 1])]
                if ready < 0:
                    break
                start = max(now, ready + passes[at, 2])
                if at == first[rank]:
                    begun[rank] = start
                now = start + passes[at, 3]
                ends[at] = now
                made_at[int(passes[at, 0])] = now
                position[rank] += 1
                moved = True
            free[rank] = now
    span, latest, earliest = 0.0, 0.0, np.inf
    for rank in range(ranks):
        if position[rank] < first[rank + 1]:
            return -1.0, -1.0
        if first[rank] < first[rank + 1]:
            span, latest = max(span, free[rank] - begun[rank]), max(latest, free[rank])
            earliest = min(earliest, begun[rank])
    return span, latest - earliest if earliest < np.inf else 0.0
