"""Plans made in rounds: in every round each rank runs at most one F and one B (of each chunk), and W where it would wait.

Qi et al. construct ZB ("Zero Bubble Pipeline Parallelism", section 3.1) and ZB-V that way. A rank that waits for its next F or B
first runs every W that fits into that time. One more W would delay the pass; it runs only if the idle time it saves is more
than the rank can afford: than what it was idle less than the rank that was idle most, since only that one decides the span.

One construction takes as long as a single simulation, hence the search tries each choice either way (``Choices``).
Rounds need one stage on every rank, or two on a V, and no R.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from megatron.pipeline.schedule.core.compiled import compiled
from megatron.pipeline.schedule.search.engine import DOWN, MID, POST, SLACK, UP, Array
from megatron.pipeline.schedule.search.instance import Instance, Plan

_NEAR = 1.01  # a plan up to this many times as long as the best may be shorter than that once it is squeezed
_REPEATS = 8  # how often a construction on a V is repeated with what ranks were idle in the one before


class Choices(NamedTuple):
    """How rounds are made.

    Attributes:
        eager: on a line, before its first B a rank may start an F that delays it; on a V, whether a W may delay an F.
        behind: on a line, a rank that is two F ahead of the next one may leave an F out; on a V, whether a W may delay the
            first half of a backward.
        dense: on a line, a W may delay a pass even if the rank can afford to wait.
        afford: the share of what a rank can afford to wait that it does wait.
    """

    eager: bool
    behind: bool
    dense: bool = False
    afford: float = 1.0


def rounds(instance: Instance, limits: Array, longest: float = np.inf, few: bool = False) -> Iterator[Plan]:
    """Plans within the limits, one for each combination of choices that finds one.

    Args:
        longest: plans with a longer span than that are of no use.
        few: whether to leave out the choices that are seldom best.
    """
    if not can_be_in_rounds(instance):
        return
    line, stages = len(instance.home) == len(limits), len(instance.home)
    work = np.zeros(len(limits))
    np.add.at(work, instance.home, instance.seconds.sum(axis=0) * instance.counts)
    constructions = [(instance.seconds, True)]
    if not line and (np.ptp(instance.seconds, axis=1) > SLACK * instance.seconds.max(axis=1)).any():
        # The rounds of a V wait for each other less where all stages are taken to be equal.
        constructions.append((np.repeat(np.median(instance.seconds, axis=1, keepdims=True), stages, axis=1), False))
    every = itertools.product((1.0,) if few else (1.0, 0.0), (True, False), (True, False), (True, False) if line else (False,))
    for (seconds, real), (afford, eager, behind, dense) in itertools.product(constructions, every):
        arrays = (*instance.arrays[:6], seconds, *instance.arrays[7:])
        spare = longest * (1 + SLACK) - work if real else np.full(len(work), np.inf)
        plan = (_line if line else _v)(instance, arrays, limits, Choices(eager, behind, dense, afford), spare)
        if plan is not None:
            longest = min(longest, plan.span * _NEAR)
            yield plan


def can_be_in_rounds(instance: Instance) -> bool:
    """Whether there are rounds for a problem."""
    shape, ranks = instance.home.tolist(), list(range(len(instance.lengths)))
    placed = shape in (ranks, [*ranks, *reversed(ranks)]) and instance.problem.placement.replicas == 1
    return placed and not instance.backwards and bool((instance.before[MID] == -2).all())


def _line(instance: Instance, arrays: tuple[Any, ...], limits: Array, choices: Choices, spare: Array) -> Plan | None:
    state = _State.of(instance, spare)
    done = _line_in_rounds(arrays, limits, choices, state)
    return instance.replay(state.order) if done else None


def _v(instance: Instance, arrays: tuple[Any, ...], limits: Array, choices: Choices, spare: Array) -> Plan | None:
    """Repeated with what each rank was idle, as long as that makes the longest idle time shorter."""
    best, before = None, np.zeros(len(limits) + 1)
    for _ in range(_REPEATS):
        state = _State.of(instance, spare)
        if not _v_in_rounds(arrays, limits, choices, before, state) or (best is not None and state.most[0] >= before[-1]):
            break
        best, before = state.order, np.append(state.idle, state.most)
        spare = np.minimum(spare, before[-1])
    return None if best is None else instance.replay(best)


class _State(NamedTuple):
    """What was placed so far.

    Attributes:
        ends: float[5, S, M], -1 for passes that are not placed.
        order: int[P, N, 3], see ``engine.construct``.
        length: int[P], how many passes of each rank are placed.
        done: int[5, S], how many passes of each kind and stage are placed.
        free, held, idle: float[P], when a rank's last pass ends; what it holds; how long it waited since its first pass.
        most: float[1], the largest of ``idle``.
        kept: float[P], the room that an F leaves for what a B allocates.
        spare: float[P], the construction ends without a plan as soon as a rank was idle for longer.
        waiting: int[P, N], the stages whose W are due, in the order of their B.
        due: int[P, 2], where the first of these is, and behind the last.
    """

    ends: Array
    order: Array
    length: Array
    done: Array
    free: Array
    held: Array
    idle: Array
    most: Array
    kept: Array
    spare: Array
    waiting: Array
    due: Array

    @staticmethod
    def of(instance: Instance, spare: Array) -> _State:
        ranks, most = len(instance.lengths), int(instance.lengths.max())
        kept = np.zeros(ranks)
        np.maximum.at(kept, instance.home, instance.allocated[UP])
        return _State(
            np.full(instance.shape, -1.0),
            np.full((ranks, most, 3), -1, np.int32),
            np.zeros(ranks, np.int64),
            np.zeros(instance.shape[:2], np.int64),
            np.zeros(ranks),
            np.zeros(ranks),
            np.zeros(ranks),
            np.zeros(1),
            kept,
            spare,
            np.zeros((ranks, most), np.int64),
            np.zeros((ranks, 2), np.int64),
        )


@compiled
def _arrives(arrays: tuple[Any, ...], state: Any, kind: int, stage: int) -> float:
    """When the input of the next F or B of a stage arrives from another rank; 0 if it needs none, -1 if it is not made yet."""
    hops_down, hops_up = arrays[1], arrays[2]
    index = state.done[kind, stage]
    if kind == DOWN and hops_down[stage] >= 0:
        made, hop = state.ends[DOWN, stage - 1, index], hops_down[stage]
    elif kind == UP and hops_up[stage] >= 0:
        made, hop = state.ends[UP, stage + 1, index], hops_up[stage]
    else:
        return 0.0
    return made + hop if made >= 0 else -1.0


@compiled
def _takes(arrays: tuple[Any, ...], state: Any, kind: int, stage: int) -> float:
    """The memory without which the next pass of a stage does not run."""
    allocated = arrays[8][kind, stage]
    return float(allocated + state.kept[arrays[0][stage]] if kind == DOWN else allocated)


@compiled
def _run(arrays: tuple[Any, ...], limits: Array, state: Any, kind: int, stage: int) -> bool:
    """Place the next pass of a kind on a stage; False if it cannot run, or does not fit into memory."""
    home, seconds, before, allocated = arrays[0], arrays[6], arrays[7], arrays[8]
    rank, index = home[stage], state.done[kind, stage]
    if index >= state.ends.shape[2] or state.held[rank] + _takes(arrays, state, kind, stage) > limits[rank] * (1 + SLACK):
        return False
    ready = _arrives(arrays, state, kind, stage)
    if before[kind, stage] >= 0:
        made = state.ends[before[kind, stage], stage, index]
        ready = min(made, max(ready, made)) if made < 0 else ready
        if made < 0:
            return False
    if ready < 0:
        return False
    place = state.length[rank]
    begin = max(state.free[rank], ready)
    if place > 0:
        state.idle[rank] += begin - state.free[rank]
        state.most[0] = max(state.most[0], state.idle[rank])
        if state.idle[rank] > state.spare[rank]:
            return False
    state.free[rank] = state.ends[kind, stage, index] = begin + seconds[kind, stage]
    state.order[rank, place, 0], state.order[rank, place, 1], state.order[rank, place, 2] = kind, stage, index
    state.length[rank] += 1
    state.done[kind, stage] += 1
    state.held[rank] += allocated[kind, stage]
    if kind == UP and before[POST, stage] != -2:
        state.waiting[rank, state.due[rank, 1]] = stage
        state.due[rank, 1] += 1
    return True


@compiled
def _weight(arrays: tuple[Any, ...], limits: Array, state: Any, rank: int) -> bool:
    """Run the W of a rank that is due longest; False if none is."""
    if state.due[rank, 0] == state.due[rank, 1]:
        return False
    stage = state.waiting[rank, state.due[rank, 0]]
    state.due[rank, 0] += 1
    return bool(_run(arrays, limits, state, POST, stage))


@compiled
def _make_room(arrays: tuple[Any, ...], limits: Array, state: Any, kind: int, stage: int) -> bool:
    """Run W until the next pass of a stage fits into memory; False if that is not enough."""
    rank, takes = arrays[0][stage], _takes(arrays, state, kind, stage)
    while state.held[rank] + takes > limits[rank] * (1 + SLACK):
        if not _weight(arrays, limits, state, rank):
            return False
    return True


@compiled
def _use_wait(
    arrays: tuple[Any, ...], limits: Array, state: Any, kind: int, stage: int, slack: float, delay: bool, always: bool
) -> None:
    """Run W while the next pass of a stage waits for its input.

    Args:
        slack: how long the rank can afford to be idle.
        delay: whether one W more may delay the pass where the wait is longer than that.
        always: the same where it is not.
    """
    seconds, rank = arrays[6], arrays[0][stage]
    arrival = _arrives(arrays, state, kind, stage)
    while state.due[rank, 0] < state.due[rank, 1]:
        due = state.waiting[rank, state.due[rank, 0]]
        if arrival < state.free[rank] + seconds[POST, due]:
            break
        _weight(arrays, limits, state, rank)
    wait = arrival - state.free[rank]
    if wait > 0 and (delay if wait > slack else always):
        _weight(arrays, limits, state, rank)


@compiled
def _line_in_rounds(  # noqa: PLR0911, PLR0912 - numba compiles it as a whole
    arrays: tuple[Any, ...], limits: Array, choices: Any, state: Any
) -> bool:
    """Fill the state for one stage on every rank; returns whether all passes were placed."""
    hops_down, hops_up, seconds, allocated = arrays[1], arrays[2], arrays[6], arrays[8]
    ranks, many = limits.shape[0], state.ends.shape[2]
    for rank in range(ranks):
        if not _run(arrays, limits, state, DOWN, rank):
            return False
    # How many more F a rank runs before its first B: those that end (or with ``eager``, begin) before the gradient is there.
    more = np.zeros(ranks, np.int64)
    made = state.free[ranks - 1] + seconds[UP, ranks - 1]
    for rank in range(ranks - 2, -1, -1):
        clock, held, arrival = state.free[rank], state.held[rank], made + hops_up[rank]
        while 1 + more[rank] < many and held + _takes(arrays, state, DOWN, rank) <= limits[rank] * (1 + SLACK):
            if clock >= arrival or (not choices.eager and clock + seconds[DOWN, rank] > arrival):
                break
            held += allocated[DOWN, rank]
            clock += seconds[DOWN, rank]
            more[rank] += 1
        made = max(clock, arrival) + seconds[UP, rank]
    for rank in range(1, ranks):
        while more[rank] > 0 and more[rank] >= more[rank - 1] and 1 + more[rank] < many:
            more[rank] -= 1
    for rank in range(ranks):
        for _ in range(more[rank]):
            if not _run(arrays, limits, state, DOWN, rank):
                return False
    for rank in range(ranks - 1, -1, -1):
        if not _run(arrays, limits, state, UP, rank):
            return False
    wanted = np.zeros(ranks + 1, np.bool_)
    for _ in range(1, many):
        for rank in range(ranks):
            wanted[rank] = state.done[DOWN, rank] < many
            if wanted[rank] and choices.behind and rank + 1 < ranks and state.done[DOWN, rank] >= state.done[DOWN, rank + 1] + 2:
                wanted[rank] = _has_time(arrays, limits, state, rank, choices.afford)
        wanted[ranks] = True
        for rank in range(ranks - 1, -1, -1):
            wanted[rank] &= wanted[rank + 1]
        for rank in range(ranks):
            if not wanted[rank]:
                continue
            if not _make_room(arrays, limits, state, DOWN, rank):
                return False
            if hops_down[rank] >= 0:
                slack = choices.afford * (state.most[0] - state.idle[rank])
                _use_wait(arrays, limits, state, DOWN, rank, slack, True, choices.dense)
            if not _run(arrays, limits, state, DOWN, rank):
                return False
        for rank in range(ranks - 1, -1, -1):
            if not _make_room(arrays, limits, state, UP, rank):
                return False
            if hops_up[rank] >= 0:
                slack = choices.afford * (state.most[0] - state.idle[rank])
                _use_wait(arrays, limits, state, UP, rank, slack, True, choices.dense)
            if rank == 0 and state.done[DOWN, 0] == many:  # nothing waits for its B
                while _weight(arrays, limits, state, 0):
                    pass
            if not _run(arrays, limits, state, UP, rank):
                return False
    return _drain(arrays, limits, state)


@compiled
def _has_time(arrays: tuple[Any, ...], limits: Array, state: Any, rank: int, afford: float) -> bool:
    """Whether a rank that is far ahead of the next one should run an F before the gradient of its next B can come."""
    hops_up, seconds, allocated = arrays[2], arrays[6], arrays[8]
    comes = state.free[rank + 1] + seconds[DOWN, rank + 1] + seconds[UP, rank + 1] + hops_up[rank]
    if state.free[rank] >= comes:
        return False
    weights, held = 0, state.held[rank] + _takes(arrays, state, DOWN, rank)
    due = state.due[rank, 1] - state.due[rank, 0]
    while held > limits[rank] * (1 + SLACK) and weights < due:
        held += allocated[POST, rank]
        weights += 1
    if state.free[rank] + seconds[DOWN, rank] + weights * seconds[POST, rank] <= comes:
        return True
    return bool(comes - state.free[rank] > afford * (state.most[0] - state.idle[rank]))


@compiled
def _v_in_rounds(  # noqa: PLR0911, PLR0912 - numba compiles it as a whole
    arrays: tuple[Any, ...], limits: Array, choices: Any, before: Array, state: Any
) -> bool:
    """Fill the state for a V: rank r has the stages r and 2p-1-r; returns whether all passes were placed.

    Args:
        before: float[P + 1], how long each rank was idle in the construction before this one, and the longest of these.
    """
    hops_down, seconds, allocated = arrays[1], arrays[6], arrays[8]
    ranks, many = limits.shape[0], state.ends.shape[2]
    last = 2 * ranks - 1
    for stage in range(ranks + 1):
        if not _run(arrays, limits, state, DOWN, stage):
            return False
    # While the first microbatch climbs the V, more of them follow, as long as time and what is needed below leave room.
    for rank in range(ranks - 2, -1, -1):
        arrival = state.ends[DOWN, last - rank - 1, 0] + hops_down[last - rank]
        least = (allocated[DOWN, rank] + allocated[DOWN, last - rank]) * (rank + 1) + state.kept[rank]
        while state.held[rank] + least <= limits[rank] * (1 + SLACK) and state.free[rank] + seconds[DOWN, rank] <= arrival:
            if state.done[DOWN, rank] >= many:
                break
            for stage in range(rank + 1):
                if not _run(arrays, limits, state, DOWN, stage):
                    return False
        if not _run(arrays, limits, state, DOWN, last - rank):
            return False
    # Later ranks catch up with earlier ones, which run no B before them: chunks take turns.
    second = False
    for rank in range(1, ranks):
        while True:
            f0, f1 = state.done[DOWN, rank], state.done[DOWN, last - rank]
            above0, above1 = state.done[DOWN, rank - 1], state.done[DOWN, last - rank + 1]
            if f0 + f1 >= above0 + above1 and not f1 <= above1 < many:
                break
            placed = False
            for other in range(ranks - 1, rank - 1, -1):
                stage = last - other if second else other
                if state.done[DOWN, stage] < many:
                    placed = True
                    if not _run(arrays, limits, state, DOWN, stage):
                        return False
            if not placed and state.done[DOWN, last - rank] >= many and state.done[DOWN, rank] >= many:
                return False
            second = not second
    for _ in range(2 * many):
        if not _backwards_on_v(arrays, limits, choices, before, state) or not _forwards_on_v(
            arrays, limits, choices, before, state
        ):
            return False
    return _drain(arrays, limits, state)


@compiled
def _backwards_on_v(arrays: tuple[Any, ...], limits: Array, choices: Any, before: Array, state: Any) -> bool:
    """One B on every rank: of the second half of a microbatch's way back where its input is made, else of the first."""
    ranks, many = limits.shape[0], state.ends.shape[2]
    last = 2 * ranks - 1
    second = np.zeros(ranks, np.bool_)
    for rank in range(ranks):
        if state.done[UP, rank] < state.done[UP, last - rank]:
            made = rank + 1 == ranks or _arrives(arrays, state, UP, rank) >= 0
            second[rank] = made or state.done[UP, last - rank] >= many
    for turn in range(2 * ranks):
        rank = ranks - 1 - turn if turn < ranks else turn - ranks
        if second[rank] != (turn < ranks):
            continue
        stage = rank if second[rank] else last - rank
        if not _make_room(arrays, limits, state, UP, stage):
            return False
        slack = choices.afford * (max(state.most[0], before[-1] - before[rank]) - state.idle[rank])
        _use_wait(arrays, limits, state, UP, stage, slack, bool(second[rank]) or choices.behind, False)
        if not _run(arrays, limits, state, UP, stage):
            return False
    return True


@compiled
def _forwards_on_v(arrays: tuple[Any, ...], limits: Array, choices: Any, before: Array, state: Any) -> bool:
    """One F on every rank: of the second chunk where its input is made, else of the first."""
    ranks, many = limits.shape[0], state.ends.shape[2]
    last = 2 * ranks - 1
    for rank in range(ranks):
        if state.done[DOWN, last - rank] >= many:
            continue
        if state.done[DOWN, last - rank] >= state.done[DOWN, rank]:
            stage = rank
        elif rank + 1 == ranks or _arrives(arrays, state, DOWN, last - rank) >= 0:
            stage = last - rank
        elif state.done[DOWN, rank] < many and (rank == 0 or _arrives(arrays, state, DOWN, rank) >= 0):
            stage = rank
        else:
            continue
        if not _make_room(arrays, limits, state, DOWN, stage):
            return False
        slack = choices.afford * (max(state.most[0], before[-1] - before[rank]) - state.idle[rank])
        _use_wait(arrays, limits, state, DOWN, stage, slack, choices.eager, False)
        if not _run(arrays, limits, state, DOWN, stage):
            return False
    return True


@compiled
def _drain(arrays: tuple[Any, ...], limits: Array, state: Any) -> bool:
    """Run the W that are still due; returns whether every pass is placed."""
    for rank in range(limits.shape[0]):
        while _weight(arrays, limits, state, rank):
            pass
    return bool((state.length == arrays[9]).all())
