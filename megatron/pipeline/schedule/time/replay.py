"""An event-driven replay of a schedule: rows of passes, each of which runs once its row is free and its inputs are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from megatron.pipeline.schedule.core.passes import Pass
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.time.links import Rows, rows_of


class Stuck(ValueError):
    """A schedule cannot finish: ``rank`` can never start ``work``, because what it needs is never made before."""

    def __init__(self, rank: int, work: Pass, needed: tuple[int, Pass]) -> None:
        super().__init__(
            f"rank {rank} is stuck at {work}: it needs {needed[1]} of rank {needed[0]}, which cannot run before it; "
            "move one of the two, or add the missing pass"
        )
        self.rank, self.work = rank, work


def dependency_order(schedule: Schedule) -> list[tuple[int, range]]:
    """All passes, as runs of (rank, slots): each pass after those it needs and after those that precede it on its rank.

    Raises:
        Stuck: some passes can never run.
    """
    return replay(schedule, rows_of(schedule, None)).runs


class Replay(NamedTuple):
    """What happens when every rank runs its passes in order.

    Attributes:
        runs: (row, its slots) that run without a wait for another one, in an order in which they can run.
        starts, ends: of every pass, by row and slot.
    """

    runs: list[tuple[int, range]]
    starts: list[list[float]]
    ends: list[list[float]]


def replay(schedule: Schedule, rows: Rows, seconds_of: Sequence[Sequence[float] | None] | None = None) -> Replay:
    """Run every pass as soon as it can.

    Args:
        seconds_of: of the passes of rows in which like ones do not take the same.

    Raises:
        Stuck: a pass precedes what it needs on its own rank, or waits for one that waits for it.
    """
    for rank, own in enumerate(schedule.rows):
        if (misplaced := own.first_before_its_need()) is not None:
            raise Stuck(rank, misplaced[0], (rank, misplaced[1]))
    made_at: list[float | None] = [None] * rows.size  # when every result was made
    for number in rows.ready:
        made_at[number] = 0
    parts: dict[int, list[float]] = {}  # when those parts were made of a result that every rank has a part in
    free: list[float] = [0] * len(rows.passes)
    run = Replay([], [[] for _ in rows.passes], [[] for _ in rows.passes])
    blocked: dict[int, list[int]] = {}  # the rows that wait for a result
    runnable = list(range(len(rows.passes)))
    while runnable:
        row = runnable.pop()
        passes, linked, starts, ends, now = rows.passes[row], rows.links[row], run.starts[row], run.ends[row], free[row]
        first, own_seconds = len(ends), seconds_of and seconds_of[row]
        for slot in range(first, len(passes)):
            kind, microbatch, chunk, _ = passes[slot]
            made, needed, hop, seconds, is_part = linked[chunk][kind]
            ready = made_at[needed + microbatch]
            if ready is None:
                blocked.setdefault(needed + microbatch, []).append(row)
                break
            if own_seconds:
                seconds = own_seconds[slot]
            arrived = ready + hop
            start = arrived if arrived > now else now
            now = start + seconds
            starts.append(start)
            ends.append(now)
            if is_part:
                there = parts.setdefault(made + microbatch, [])
                there.append(now)
                if len(there) < schedule.ranks:
                    continue
                made_at[made + microbatch] = max(there)
            else:
                made_at[made + microbatch] = now
            if made + microbatch in blocked:
                runnable += blocked.pop(made + microbatch)
        free[row] = now
        run.runs.append((row, range(first, len(ends))))
    if blocked:
        raise _first_stuck(schedule, run, blocked)
    return run


def _first_stuck(schedule: Schedule, run: Replay, blocked: Mapping[int, Sequence[int]]) -> Stuck:
    if len(run.ends) > schedule.ranks:
        dependency_order(schedule)  # without lanes it gets stuck at the same pass, and says so
    rank = next(iter(chain(*blocked.values())))
    work = schedule.passes[rank][len(run.ends[rank])]
    done = [set(passes[: len(ends)]) for passes, ends in zip(schedule.passes, run.ends, strict=True)]
    return Stuck(rank, work, next(need for need in schedule.predecessors(rank, work) if need[1] not in done[need[0]]))
