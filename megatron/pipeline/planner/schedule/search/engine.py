"""Compiled list scheduling: the rank that is free first takes the pass of highest priority that fits into its memory.

Its five kinds of passes are those of ``time/orders.py``, which has the compiled replay of the orders that are made here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron.pipeline.planner.schedule.core.compiled import compiled
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.time.orders import DOWN, POST, UP, Array, BusyLinks, enter


class Arrays(NamedTuple):
    """One problem, with P ranks, S stages and M microbatches.

    Attributes:
        home: int[S], the rank of every stage.
        hops: float[5, S, M], see ``orders.hops_of``.
        seconds: float[5, S, M].
        before: int[5, S], the kind that precedes on the stage, -1 for none, -2 where the stage has no such passes.
        allocated: float[5, S, M], by a pass when it starts (positive) or ends (negative).
        together: float[5, S, M + 1], by the first k passes.
        lengths: int[P], how many passes a rank has.
        waits: see ``orders.BusyLinks``.
        lines, first: the (kind, stage) of every rank's passes: those of a rank are ``lines[first[rank] : first[rank + 1]]``.
    """

    home: Array
    hops: Array
    waits: BusyLinks
    seconds: Array
    before: Array
    allocated: Array
    together: Array
    lengths: Array
    lines: Array
    first: Array


class Preferences(NamedTuple):
    """Preferences of list scheduling.

    Attributes:
        targets: float[5, S, M], priorities: the smallest first.
        caps, quotas: int[S], how many microbatches a stage may have between DOWN and UP, and between DOWN and its last pass; None
            for any number, until ``Instance.construct`` says so in arrays.
        window: seconds for which a rank waits for a pass with a smaller target.
        in_order: whether the DOWN of a rank run in the order of their targets, so that no later one takes the memory of an
            earlier one.
    """

    targets: Array
    caps: Array | None = None
    quotas: Array | None = None
    window: float = 0.0
    in_order: bool = False


class PlacedPasses(NamedTuple):
    """Passes that list scheduling has placed so far.

    Attributes:
        ends: float[5, S, M], -1 for passes that are not placed.
        order: int[P, N, 3], (kind, stage, microbatch) of every rank's passes.
        done: int[5, S], how many passes of each kind and stage are placed.
        length: int[P], how many passes of each rank are placed.
        free, clock, held: float[P], when a rank's last pass ends, when it decides next, and what it holds.
        spare: float[P], for how many seconds each rank may yet be idle.
    """

    ends: Array
    order: Array
    done: Array
    length: Array
    free: Array
    clock: Array
    held: Array
    spare: Array

    @staticmethod
    def none(arrays: Arrays, spare: Array) -> PlacedPasses:
        shape, ranks = arrays.seconds.shape, len(arrays.lengths)
        order = np.full((ranks, int(arrays.lengths.max()), 3), -1, np.int32)
        done, length, (free, clock, held) = np.zeros(shape[:2], np.int64), np.zeros(ranks, np.int64), np.zeros((3, ranks))
        return PlacedPasses(np.full(shape, -1.0), order, done, length, free, clock, held, spare)


@compiled
def construct(arrays: Any, limits: Array, policy: Any, placed: Any, from_zero: bool) -> int:
    """Place passes by list scheduling; returns 1 if all were placed, 0 if some cannot be, -1 if a rank is idle too long.

    At every decision the rank that is free first considers the passes whose inputs arrive within the window, and takes the
    one with the smallest target. While it waits for that pass, it runs others that end in time.

    Memory cannot run into a dead end: when a pass allocates, the rank keeps enough room for all that its oldest
    microbatch that still allocates there needs, counting what older microbatches will free. So the oldest unfinished
    microbatch of the pipeline can always go on.

    Args:
        arrays: of the problem, ``Arrays``.
        limits: float[P].
        policy: ``Preferences``.
        placed: ``PlacedPasses``, none so far.
        from_zero: whether a rank's time before its first pass counts as idle, too.
    """
    clock, free, spare = placed.clock, placed.free, placed.spare
    late = 0.0  # by how much all times may be later than the order makes necessary
    remaining = arrays.lengths.sum()
    while remaining > 0:
        rank = 0
        for other in range(1, clock.shape[0]):
            if clock[other] < clock[rank]:
                rank = other
        now = clock[rank]
        if now == np.inf:
            return 0
        kind, stage, ready = _choose(arrays, limits, policy, placed, rank)
        if kind < 0 or ready > now * (1 + SLACK):
            clock[rank] = ready  # it decides again then; never, unless a result is made that it waits for
            continue
        begin = max(now, ready)
        late += begin - max(free[rank], ready)
        if from_zero or placed.length[rank] > 0:
            spare[rank] -= begin - free[rank]
            if spare[rank] + late < 0:
                return -1
        _place(arrays, placed, rank, kind, stage, begin)
        remaining -= 1
    return 1


@compiled
def _choose(arrays: Any, limits: Array, policy: Any, placed: Any, rank: int) -> tuple[int, int, float]:  # noqa: PLR0912 - compiled
    """Kind and stage of the pass that a rank takes next, and when its inputs are there; kind -1 if none can run until then.

    The first round finds the pass to wait for; if the rank would be idle until then, the second finds one that fits before.
    """
    seconds, before, allocated, targets, done = arrays.seconds, arrays.before, arrays.allocated, policy.targets, placed.done
    mine, many, now = arrays.lines[arrays.first[rank] : arrays.first[rank + 1]], seconds.shape[2], placed.clock[rank]
    oldest, reserved = -1, 0.0  # of this rank, not known yet: few passes need it
    room = limits[rank] * (1 + SLACK) - placed.held[rank]
    turn = np.inf  # the smallest target of a DOWN
    if policy.in_order:
        for line in range(mine.shape[0]):
            kind, stage = mine[line, 0], mine[line, 1]
            if kind == DOWN and done[DOWN, stage] < many:
                turn = min(turn, targets[DOWN, stage, done[DOWN, stage]])
    chosen, chosen_stage, chosen_ready = -1, -1, np.inf
    horizon, deadline, kept = now + policy.window, np.inf, 0.0
    soonest = np.inf
    for _ in range(2):
        best, best_stage, best_ready, best_target = -1, -1, np.inf, np.inf
        for line in range(mine.shape[0]):
            kind, stage = mine[line, 0], mine[line, 1]
            index = done[kind, stage]
            if index >= many or now + seconds[kind, stage, index] > deadline:
                continue
            target = targets[kind, stage, index]
            if target >= best_target:
                continue
            if kind == DOWN:
                last = POST if before[POST, stage] != -2 else UP  # of a microbatch on the stage
                held, unfinished = index - done[UP, stage], index - done[last, stage]
                if target > turn or held >= policy.caps[stage] or unfinished >= policy.quotas[stage]:
                    continue
            takes = allocated[kind, stage, index]
            if takes > 0 and takes + kept > room:
                continue
            ready = arrival(kind, stage, index, arrays, placed.ends)
            if ready < 0:
                continue
            if takes > 0:
                if oldest < 0:
                    oldest, reserved = _reserve(mine, allocated, arrays.together, done)
                if (reserved if index == oldest else takes + reserved) > room:
                    continue
            soonest = min(soonest, ready)
            if ready <= horizon:
                best, best_stage, best_ready, best_target = kind, stage, ready, target
        if best >= 0:
            chosen, chosen_stage, chosen_ready = best, best_stage, best_ready
        if best < 0 or best_ready <= now * (1 + SLACK):
            break
        horizon, deadline = now * (1 + SLACK), best_ready * (1 + SLACK)
        kept = max(0.0, allocated[best, best_stage, done[best, best_stage]])
    return chosen, chosen_stage, chosen_ready if chosen >= 0 else soonest


@compiled
def _place(arrays: Any, placed: Any, rank: int, kind: int, stage: int, begin: float) -> None:
    """Place a rank's next pass, and have the rank that may wait for its result decide again."""
    home, hops, clock, free, order, length = arrays.home, arrays.hops, placed.clock, placed.free, placed.order, placed.length
    index, now = placed.done[kind, stage], clock[rank]
    end = begin + arrays.seconds[kind, stage, index]
    placed.ends[kind, stage, index] = end
    order[rank, length[rank], 0] = kind
    order[rank, length[rank], 1] = stage
    order[rank, length[rank], 2] = index
    length[rank] += 1
    placed.held[rank] += arrays.allocated[kind, stage, index]
    placed.done[kind, stage] += 1
    free[rank] = end
    clock[rank] = end
    neighbour = stage + (kind == DOWN) - (kind == UP)
    if neighbour != stage and 0 <= neighbour < home.shape[0] and hops[kind, neighbour, index] >= 0:
        if arrays.waits.free.shape[0] > 0:
            enter(arrays.waits, hops, kind, neighbour, index, end)
        waiting = home[neighbour]
        if clock[waiting] > free[waiting]:
            clock[waiting] = max(free[waiting], now)


@compiled
def arrival(kind: int, stage: int, index: int, arrays: Any, ends: Array) -> float:
    """When the inputs of a pass have arrived; -1 if a pass that makes one has no time yet (-1 in ``ends``)."""
    ready = 0.0
    if arrays.before[kind, stage] >= 0:
        ready = ends[arrays.before[kind, stage], stage, index]
        if ready < 0:
            return -1.0
    if arrays.hops[kind, stage, index] < 0:
        return ready
    made = ends[kind, stage - 1 if kind == DOWN else stage + 1, index]
    return max(ready, made + arrays.hops[kind, stage, index]) if made >= 0 else -1.0


@compiled
def _reserve(mine: Array, allocated: Array, together: Array, done: Array) -> tuple[Any, float]:
    """The oldest microbatch that still allocates on a rank, and the memory it needs there beyond what older ones will free."""
    many = np.int64(allocated.shape[2])
    oldest = many
    for line in range(mine.shape[0]):
        kind, stage = mine[line, 0], mine[line, 1]
        if allocated[kind, stage, 0] > 0 and done[kind, stage] < oldest:
            oldest = done[kind, stage]
    reserved = 0.0
    for line in range(mine.shape[0]):
        kind, stage = mine[line, 0], mine[line, 1]
        reserved -= together[kind, stage, min(done[kind, stage], oldest)]
        if oldest < many and allocated[kind, stage, oldest] > 0 and done[kind, stage] <= oldest:
            reserved += allocated[kind, stage, oldest]
    return oldest, reserved
