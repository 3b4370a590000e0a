"""Compiled list scheduling: the rank that is free first takes the pass of highest priority that fits into its memory.

The rules know five kinds of passes, in the order in which a microbatch meets them on a stage:

    PRE -> DOWN -> MID -> UP -> POST

DOWN travels from the first stage to the last and UP back; the others stay on their stage. A problem read forwards in time
has F as DOWN, R as MID, B (or BW) as UP and W as POST. Read backwards it has W as PRE, B (or BW) as DOWN, R as MID and F as
UP: so the code that plans the start of an iteration also plans its end.

All functions here work on the arrays of one problem, with P ranks and S stages, in this order (``Instance.arrays``):

    home                int[S], the rank of every stage
    hops_down, hops_up  float[S], seconds from the stage before (behind) to this one; -1 where a model begins (ends)
    counts              int[S], how many microbatches go through a stage
    replica             int[S], the model that a stage belongs to; its microbatch k is number k * replicas + replica
    replicas            how many models there are
    seconds             float[5, S]
    before              int[5, S], the kind that precedes on the stage, -1 for none, -2 where the stage has no such passes
    allocated           float[5, S], by a pass when it starts (positive) or ends (negative)
    lengths             int[P], how many passes a rank has
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.pipeline.schedule.core.compiled import compiled

Array: TypeAlias = NDArray[Any]


PRE, DOWN, MID, UP, POST = range(5)
KINDS = 5
SLACK = 1e-9  # relative: rounding errors of sums are below this


@compiled
def construct(  # noqa: PLR0912, PLR0915 - one loop, which numba compiles as a whole
    arrays: tuple[Any, ...], limits: Array, targets: Array, caps: Array, quotas: Array, window: float, in_order: bool,
    ends: Array, order: Array,
) -> bool:  # fmt: skip
    """Fill ``ends`` and ``order`` by list scheduling; returns whether every pass was placed.

    At every decision the rank that is free first considers the passes whose inputs arrive within ``window``, and takes the
    one with the smallest target. While it waits for that pass, it runs others that end in time.

    Memory cannot run into a dead end: when a pass allocates, the rank keeps enough room for all that its oldest
    microbatch that still allocates there needs, counting what older microbatches will free. So the oldest unfinished
    microbatch of the pipeline can always go on.

    Args:
        arrays: of the problem, as at the top of this file.
        limits: float[P].
        targets: float[5, S, M], priorities.
        caps, quotas: int[S], how many microbatches a stage may have between DOWN and UP, and between DOWN and its last pass.
        window: seconds.
        in_order: whether the DOWN of a rank run in the order of their targets, so that no later one takes the memory of an
            earlier one.
        ends: float[5, S, M], filled; -1 for passes that were not placed.
        order: int[P, N, 3], filled with (kind, stage, microbatch).
    """
    home, hops_down, hops_up, counts, replica, replicas, seconds, before, allocated, _ = arrays
    ranks, stages = limits.shape[0], home.shape[0]
    ends[:] = -1.0
    done = np.zeros((KINDS, stages), np.int64)
    length = np.zeros(ranks, np.int64)
    free = np.zeros(ranks)  # when the rank's last pass ends
    clock = np.zeros(ranks)  # when it decides next
    held = np.zeros(ranks)
    first, lines = _lines_by_rank(home, before, ranks)
    remaining = 0  # passes
    last = np.full(stages, UP)
    for kind, stage in lines:
        last[stage] = max(last[stage], kind)
        remaining += counts[stage]

    while remaining > 0:
        rank = np.argmin(clock)
        now = clock[rank]
        if now == np.inf:
            return False
        mine = lines[first[rank] : first[rank + 1]]
        oldest, reserved = _reserve(mine, counts, replica, replicas, allocated, done)
        room = limits[rank] * (1 + SLACK) - held[rank]

        turn = np.inf  # the smallest target of a DOWN
        if in_order:
            for line in range(mine.shape[0]):
                kind, stage = mine[line, 0], mine[line, 1]
                if kind == DOWN and done[DOWN, stage] < counts[stage]:
                    turn = min(turn, targets[DOWN, stage, done[DOWN, stage]])

        # The first round finds the pass to wait for; if the rank would be idle until then, the second finds one that fits before.
        chosen, chosen_stage, chosen_ready = -1, -1, np.inf
        horizon, deadline, kept = now + window, np.inf, 0.0
        soonest = np.inf
        for _ in range(2):
            best, best_stage, best_ready, best_target = -1, -1, np.inf, np.inf
            for line in range(mine.shape[0]):
                kind, stage = mine[line, 0], mine[line, 1]
                index = done[kind, stage]
                if index >= counts[stage] or now + seconds[kind, stage] > deadline:
                    continue
                target = targets[kind, stage, index]
                if target >= best_target:
                    continue
                if kind == DOWN and (
                    target > turn or index - done[UP, stage] >= caps[stage] or index - done[last[stage], stage] >= quotas[stage]
                ):
                    continue
                takes = allocated[kind, stage]
                if takes > 0:
                    own = index * replicas + replica[stage] == oldest
                    if takes + kept > room or (reserved if own else takes + reserved) > room:
                        continue
                ready = _arrival(kind, stage, index, hops_down, hops_up, before, ends)
                if ready < 0:
                    continue
                soonest = min(soonest, ready)
                if ready <= horizon:
                    best, best_stage, best_ready, best_target = kind, stage, ready, target
            if best >= 0:
                chosen, chosen_stage, chosen_ready = best, best_stage, best_ready
            if best < 0 or best_ready <= now * (1 + SLACK):
                break
            horizon, deadline = now * (1 + SLACK), best_ready * (1 + SLACK)
            kept = max(0.0, allocated[best, best_stage])
        if chosen < 0:
            clock[rank] = soonest  # infinite if the rank has to wait for a result that is not made yet
            continue
        if chosen_ready > now * (1 + SLACK):
            clock[rank] = chosen_ready  # decide again then
            continue

        index = done[chosen, chosen_stage]
        end = max(now, chosen_ready) + seconds[chosen, chosen_stage]
        ends[chosen, chosen_stage, index] = end
        order[rank, length[rank], 0] = chosen
        order[rank, length[rank], 1] = chosen_stage
        order[rank, length[rank], 2] = index
        length[rank] += 1
        held[rank] += allocated[chosen, chosen_stage]
        done[chosen, chosen_stage] += 1
        free[rank] = end
        clock[rank] = end
        remaining -= 1
        waiting = -1  # the rank that may wait for the result
        if chosen == DOWN and chosen_stage + 1 < stages and hops_down[chosen_stage + 1] >= 0:
            waiting = home[chosen_stage + 1]
        elif chosen == UP and chosen_stage > 0 and hops_up[chosen_stage - 1] >= 0:
            waiting = home[chosen_stage - 1]
        if waiting >= 0 and clock[waiting] > free[waiting]:
            clock[waiting] = max(free[waiting], now)
    return True


@compiled
def _lines_by_rank(home: Array, before: Array, ranks: int) -> tuple[Array, Array]:
    """The (kind, stage) pairs of every rank's passes: those of a rank are ``lines[first[rank]:first[rank + 1]]``."""
    first = np.zeros(ranks + 1, np.int64)
    lines = np.zeros((before.size, 2), np.int64)
    number = 0
    for rank in range(ranks):
        for stage in np.flatnonzero(home == rank):
            for kind in range(KINDS):
                if before[kind, stage] != -2:
                    lines[number] = kind, stage
                    number += 1
        first[rank + 1] = number
    return first, lines[:number]


@compiled
def _arrival(kind: int, stage: int, index: int, hops_down: Array, hops_up: Array, before: Array, ends: Array) -> float:
    """When the inputs of a pass have arrived; -1 if a pass that makes one has no time yet (-1 in ``ends``)."""
    ready = 0.0
    previous = before[kind, stage]
    if previous >= 0:
        ready = ends[previous, stage, index]
        if ready < 0:
            return -1.0
    if kind == DOWN and hops_down[stage] >= 0:
        made, hop = ends[DOWN, stage - 1, index], hops_down[stage]
    elif kind == UP and hops_up[stage] >= 0:
        made, hop = ends[UP, stage + 1, index], hops_up[stage]
    else:
        return ready
    return max(ready, made + hop) if made >= 0 else -1.0


@compiled
def _reserve(mine: Array, counts: Array, replica: Array, replicas: int, allocated: Array, done: Array) -> tuple[Any, float]:
    """The oldest microbatch that still allocates on a rank, and the memory it needs there beyond what older ones will free."""
    oldest = np.int64(2**62)
    for line in range(mine.shape[0]):
        kind, stage = mine[line, 0], mine[line, 1]
        if allocated[kind, stage] > 0 and done[kind, stage] < counts[stage]:
            oldest = min(oldest, done[kind, stage] * replicas + replica[stage])
    reserved = 0.0
    for line in range(mine.shape[0]):
        kind, stage = mine[line, 0], mine[line, 1]
        edge = min(counts[stage], (oldest - replica[stage] + replicas - 1) // replicas)
        reserved -= allocated[kind, stage] * min(done[kind, stage], edge)
        belongs = edge < counts[stage] and edge * replicas + replica[stage] == oldest
        if belongs and allocated[kind, stage] > 0 and done[kind, stage] <= edge:
            reserved += allocated[kind, stage]
    return oldest, reserved


@compiled
def replay(arrays: tuple[Any, ...], order: Array, factors: Array, ends: Array) -> tuple[float, float]:
    """Fill ``ends`` with the earliest times at which the passes of an order end; returns (span, makespan), or -1 if stuck.

    ``factors``, float[5, S, M] or float[1, 1, 1] for all passes, multiply the seconds.
    """
    _, hops_down, hops_up, _, _, _, seconds, before, _, lengths = arrays
    same = factors.size == 1
    firsts = np.zeros(lengths.shape[0])
    ranks = lengths.shape[0]
    ends[:] = -1.0
    position = np.zeros(ranks, np.int64)
    free = np.zeros(ranks)
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while position[rank] < lengths[rank]:
                kind, stage, index = order[rank, position[rank]]
                # ``_arrival``, written out: calls count references to the arrays, with which this loop takes 6 times as long.
                start = free[rank]
                if before[kind, stage] >= 0 and ends[before[kind, stage], stage, index] < 0:
                    break
                if kind == DOWN and hops_down[stage] >= 0:
                    arrival = ends[DOWN, stage - 1, index]
                    if arrival < 0:
                        break
                    start = max(start, arrival + hops_down[stage])
                elif kind == UP and hops_up[stage] >= 0:
                    arrival = ends[UP, stage + 1, index]
                    if arrival < 0:
                        break
                    start = max(start, arrival + hops_up[stage])
                if position[rank] == 0:
                    firsts[rank] = start
                factor = factors[0, 0, 0] if same else factors[kind, stage, index]
                free[rank] = start + seconds[kind, stage] * factor
                ends[kind, stage, index] = free[rank]
                position[rank] += 1
                moved = True
    span = 0.0
    makespan = 0.0
    for rank in range(ranks):
        if position[rank] < lengths[rank]:
            return -1.0, -1.0
        span = max(span, free[rank] - firsts[rank])
        makespan = max(makespan, free[rank])
    return span, makespan
