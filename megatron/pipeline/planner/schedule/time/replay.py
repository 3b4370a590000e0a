"""The times of rows of passes in a given order: each pass runs once its row is free and its inputs have arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.time.links import Rows, rows_of


class Stuck(ValueError):
    """A schedule cannot finish: ``rank`` can never start ``work``, because a pass that it needs never runs before it."""

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
    rows = rows_of(schedule, None)
    runs = replay(schedule, rows).runs
    if not any(row.is_braided for row in schedule.rows):
        return runs
    places = [[0, *accumulate(work is not None for work in works)] for works in rows.works]  # passes before every slot
    return [(row, range(places[row][slots.start], places[row][slots.stop])) for row, slots in runs]


class Replay(NamedTuple):
    """The times of all rows.

    Attributes:
        runs: (row, slots that it runs without waiting), in an order in which they can run.
        starts, ends: of every pass, by row and slot.
    """

    runs: list[tuple[int, range]]
    starts: list[list[float]]
    ends: list[list[float]]


def replay(schedule: Schedule, rows: Rows) -> Replay:
    """Run every row's passes in their order, each as soon as it can.

    Raises:
        Stuck: a pass precedes what it needs on its own rank, or waits for one that waits for it.
    """
    for rank, own in enumerate(schedule.rows):
        if (misplaced := own.first_before_its_need()) is not None:
            raise Stuck(rank, misplaced[0], (rank, misplaced[1]))
    run, blocked = advance(rows, schedule.ranks)
    if blocked:
        raise _first_stuck(schedule, rows, run, blocked)
    return run


def advance(rows: Rows, parts_of_all: int) -> tuple[Replay, dict[int, list[int]]]:
    """Run every row as far as it gets.

    Times follow from the order alone, so rows need not take turns: each runs until it needs a result that does not exist yet.

    Args:
        parts_of_all: how many parts make a result that every rank has a part in.

    Returns:
        The times of what ran, and by number of a result that is never made the rows that wait for it.
    """
    made_at = list(rows.made_at)
    parts: dict[int, list[float]] = {}  # of results that every rank has a part in: when the parts made so far were made
    free: list[float] = [0] * len(rows.passes)
    lines: dict[tuple[int, int], float] = {}  # by way, when a link is free on which messages stand in line
    run = Replay([], [[] for _ in rows.passes], [[] for _ in rows.passes])
    blocked: dict[int, list[int]] = {}  # the rows that wait for a result
    runnable = list(range(len(rows.passes)))
    while runnable:
        row = runnable.pop()
        passes, linked, starts, ends, now = rows.passes[row], rows.links[row], run.starts[row], run.ends[row], free[row]
        first = len(ends)
        for slot in range(first, len(passes)):
            kind, microbatch, chunk = passes[slot]
            made, needed, hop, seconds, is_part, line = linked[chunk][kind]
            ready = made_at[needed + microbatch]
            if ready is None:
                blocked.setdefault(needed + microbatch, []).append(row)
                break
            arrived = ready + hop[microbatch]
            start = arrived if arrived > now else now
            now = start + seconds[microbatch]
            starts.append(start)
            ends.append(now)
            if is_part:
                there = parts.setdefault(made + microbatch, [])
                there.append(now)
                if len(there) < parts_of_all:
                    continue
                made_at[made + microbatch] = max(there)
            else:
                made_at[made + microbatch] = line.enter(lines, microbatch, now) if line else now
            if made + microbatch in blocked:
                runnable += blocked.pop(made + microbatch)
        free[row] = now
        run.runs.append((row, range(first, len(ends))))
    return run, blocked


def _first_stuck(schedule: Schedule, rows: Rows, run: Replay, blocked: Mapping[int, Sequence[int]]) -> Stuck:
    if len(run.ends) > schedule.ranks:
        dependency_order(schedule)  # without lanes it gets stuck at the same pass, and says so
    rank = next(iter(chain(*blocked.values())))
    done = [set(filter(None, works[: len(ends)])) for works, ends in zip(rows.works, run.ends, strict=True)]
    left = [work for work in rows.works[rank][len(run.ends[rank]) :] if work is not None]
    for work in left[:1] if not left[1:] or not left[1].kind.row.braided else left[:2]:
        for other, need in schedule.predecessors(rank, work):
            if need not in done[other]:
                return Stuck(rank, left[0], (other, need))
    raise AssertionError("a row that cannot go on lacks a result")
