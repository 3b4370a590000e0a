"""The loops that make a plan in rounds: see ``rounds``, which tries their choices."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron.pipeline.planner.schedule.core.compiled import compiled
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.search.instance import Instance
from megatron.pipeline.planner.schedule.time.orders import DOWN, POST, UP, Array


class RoundChoices(NamedTuple):
    """Choices in making rounds.

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


class State(NamedTuple):
    """Passes that were placed so far.

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
        more: int[P], on a line how many more F a rank runs before its first B.
        wanted: bool[P + 1], what a round is to run: on a line an F, on a V the B of the second half.
        limits: float[P].
        before: float[P + 1], how long each rank was idle in the construction before this one, and the longest of these; zeros if
            there is none.
        choices: in making rounds.
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
    more: Array
    wanted: Array
    limits: Array
    before: Array
    choices: RoundChoices

    @staticmethod
    def of(instance: Instance, spare: Array, limits: Array, before: Array, choices: RoundChoices) -> State:
        ranks, most = len(instance.lengths), int(instance.lengths.max())
        free, held, idle, kept = np.zeros((4, ranks))
        np.maximum.at(kept, instance.home, instance.allocated[UP].max(axis=1))
        return State(
            ends=np.full(instance.shape, -1.0),
            order=np.full((ranks, most, 3), -1, np.int32),
            length=np.zeros(ranks, np.int64),
            done=np.zeros(instance.shape[:2], np.int64),
            free=free, held=held, idle=idle, most=np.zeros(1), kept=kept, spare=spare,
            waiting=np.zeros((ranks, most), np.int64),
            due=np.zeros((ranks, 2), np.int64),
            more=np.zeros(ranks, np.int64),
            wanted=np.zeros(ranks + 1, np.bool_),
            limits=limits, before=before, choices=choices,
        )  # fmt: skip


@compiled
def _arrives(arrays: Any, state: Any, kind: int, stage: int) -> float:
    """When the input of the next F or B of a stage arrives from another rank; 0 if it needs none, -1 if it is not made yet."""
    index = state.done[kind, stage]
    hop = arrays.hops[kind, stage, index]
    if hop < 0:
        return 0.0
    made = state.ends[kind, stage - 1 if kind == DOWN else stage + 1, index]
    return made + hop if made >= 0 else -1.0


@compiled
def _takes(arrays: Any, state: Any, kind: int, stage: int) -> float:
    """The memory without which the next pass of a stage does not run."""
    allocated = arrays.allocated[kind, stage, min(state.done[kind, stage], state.ends.shape[2] - 1)]
    return float(allocated + state.kept[arrays.home[stage]] if kind == DOWN else allocated)


@compiled
def _run(arrays: Any, state: Any, kind: int, stage: int) -> bool:
    """Place the next pass of a kind on a stage; False if it cannot run, or does not fit into memory."""
    rank, index = arrays.home[stage], state.done[kind, stage]
    if index >= state.ends.shape[2] or state.held[rank] + _takes(arrays, state, kind, stage) > state.limits[rank] * (1 + SLACK):
        return False
    previous, ready = arrays.before[kind, stage], _arrives(arrays, state, kind, stage)
    if ready < 0 or (previous >= 0 and state.ends[previous, stage, index] < 0):
        return False
    place = state.length[rank]
    begin = max(state.free[rank], ready)
    if place > 0:
        state.idle[rank] += begin - state.free[rank]
        state.most[0] = max(state.most[0], state.idle[rank])
        if state.idle[rank] > state.spare[rank]:
            return False
    state.free[rank] = state.ends[kind, stage, index] = begin + arrays.seconds[kind, stage, index]
    state.order[rank, place, 0], state.order[rank, place, 1], state.order[rank, place, 2] = kind, stage, index
    state.length[rank] += 1
    state.done[kind, stage] += 1
    state.held[rank] += arrays.allocated[kind, stage, index]
    if kind == UP and arrays.before[POST, stage] != -2:
        state.waiting[rank, state.due[rank, 1]] = stage
        state.due[rank, 1] += 1
    return True


@compiled
def _weight(arrays: Any, state: Any, rank: int) -> bool:
    """Run the W of a rank that is due longest; False if none is."""
    if state.due[rank, 0] == state.due[rank, 1]:
        return False
    stage = state.waiting[rank, state.due[rank, 0]]
    state.due[rank, 0] += 1
    return bool(_run(arrays, state, POST, stage))


@compiled
def _run_after_weights(arrays: Any, state: Any, kind: int, stage: int, delay: bool, always: bool) -> bool:
    """Place the next F or B of a stage, behind the W that make room for it or run while it waits; False if it cannot run.

    Args:
        delay: whether one W more may delay the pass where the wait is longer than the rank can afford to be idle.
        always: the same where it is not.
    """
    rank, takes = arrays.home[stage], _takes(arrays, state, kind, stage)
    while state.held[rank] + takes > state.limits[rank] * (1 + SLACK):
        if not _weight(arrays, state, rank):
            return False
    if arrays.hops[kind, stage, 0] >= 0:
        arrives = _arrives(arrays, state, kind, stage)
        while state.due[rank, 0] < state.due[rank, 1]:
            due = state.waiting[rank, state.due[rank, 0]]
            if arrives < state.free[rank] + arrays.seconds[POST, due, state.done[POST, due]]:
                break
            _weight(arrays, state, rank)
        slack = state.choices.afford * (max(state.most[0], state.before[-1] - state.before[rank]) - state.idle[rank])
        wait = arrives - state.free[rank]
        if wait > 0 and (delay if wait > slack else always):
            _weight(arrays, state, rank)
    return bool(_run(arrays, state, kind, stage))


@compiled
def line_in_rounds(arrays: Any, state: Any) -> bool:  # noqa: PLR0912 - numba compiles it as a whole
    """Fill the state for one stage on every rank; returns whether all passes were placed."""
    hops, seconds, allocated = arrays.hops, arrays.seconds, arrays.allocated
    ranks, many, choices = state.limits.shape[0], state.ends.shape[2], state.choices
    for rank in range(ranks):
        if not _run(arrays, state, DOWN, rank):
            return False
    # How many more F a rank runs before its first B: those that end (or with ``eager``, begin) before the gradient is there.
    more = state.more
    made = state.free[ranks - 1] + seconds[UP, ranks - 1, 0]
    for rank in range(ranks - 2, -1, -1):
        clock, held, arrives = state.free[rank], state.held[rank], made + hops[UP, rank, 0]
        while 1 + more[rank] < many:
            index = 1 + more[rank]
            if held + (allocated[DOWN, rank, index] + state.kept[rank]) > state.limits[rank] * (1 + SLACK):
                break
            if clock >= arrives or (not choices.eager and clock + seconds[DOWN, rank, index] > arrives):
                break
            held += allocated[DOWN, rank, index]
            clock += seconds[DOWN, rank, index]
            more[rank] += 1
        made = max(clock, arrives) + seconds[UP, rank, 0]
    for rank in range(1, ranks):
        while more[rank] > 0 and more[rank] >= more[rank - 1] and 1 + more[rank] < many:
            more[rank] -= 1
    for rank in range(ranks):
        for _ in range(more[rank]):
            if not _run(arrays, state, DOWN, rank):
                return False
    for rank in range(ranks - 1, -1, -1):
        if not _run(arrays, state, UP, rank):
            return False
    wanted = state.wanted
    for _ in range(1, many):
        for rank in range(ranks):
            wanted[rank] = state.done[DOWN, rank] < many
            if wanted[rank] and choices.behind and rank + 1 < ranks and state.done[DOWN, rank] >= state.done[DOWN, rank + 1] + 2:
                wanted[rank] = _has_time(arrays, state, rank)
        wanted[ranks] = True
        for rank in range(ranks - 1, -1, -1):
            wanted[rank] &= wanted[rank + 1]
        for rank in range(ranks):
            if wanted[rank] and not _run_after_weights(arrays, state, DOWN, rank, True, choices.dense):
                return False
        for rank in range(ranks - 1, -1, -1):
            if rank == 0 and state.done[DOWN, 0] == many:  # nothing waits for its B
                while _weight(arrays, state, 0):
                    pass
            if not _run_after_weights(arrays, state, UP, rank, True, choices.dense):
                return False
    return _drain(arrays, state)


@compiled
def _has_time(arrays: Any, state: Any, rank: int) -> bool:
    """Tell whether a rank that is far ahead of the next one should run an F before the gradient of its next B can come."""
    seconds, allocated = arrays.seconds, arrays.allocated
    down, up, post = state.done[DOWN, rank], state.done[UP, rank], state.done[POST, rank]
    after = min(state.done[DOWN, rank + 1], state.ends.shape[2] - 1)
    comes = state.free[rank + 1] + seconds[DOWN, rank + 1, after] + seconds[UP, rank + 1, up] + arrays.hops[UP, rank, up]
    if state.free[rank] >= comes:
        return False
    weights, held = 0, state.held[rank] + _takes(arrays, state, DOWN, rank)
    due = state.due[rank, 1] - state.due[rank, 0]
    while held > state.limits[rank] * (1 + SLACK) and weights < due:
        held += allocated[POST, rank, post + weights]
        weights += 1
    if state.free[rank] + seconds[DOWN, rank, down] + weights * seconds[POST, rank, min(post, state.ends.shape[2] - 1)] <= comes:
        return True
    return bool(comes - state.free[rank] > state.choices.afford * (state.most[0] - state.idle[rank]))


@compiled
def v_in_rounds(arrays: Any, state: Any) -> bool:  # noqa: PLR0911, PLR0912 - numba compiles it as a whole
    """Fill the state for a V: rank r has the stages r and 2p-1-r; returns whether all passes were placed."""
    hops, seconds, allocated = arrays.hops, arrays.seconds, arrays.allocated
    ranks, many = state.limits.shape[0], state.ends.shape[2]
    last = 2 * ranks - 1
    for stage in range(ranks + 1):
        if not _run(arrays, state, DOWN, stage):
            return False
    # While the first microbatch climbs the V, more of them follow, as long as time and what is needed below leave room.
    for rank in range(ranks - 2, -1, -1):
        arrives = state.ends[DOWN, last - rank - 1, 0] + hops[DOWN, last - rank, 0]
        while state.done[DOWN, rank] < many:
            index = state.done[DOWN, rank]
            if state.free[rank] + seconds[DOWN, rank, index] > arrives:
                break
            microbatch = allocated[DOWN, rank, index] + allocated[DOWN, last - rank, index]
            most = min(state.held[rank] + microbatch * (rank + 1), microbatch * many)  # no more than all microbatches hold
            if most + state.kept[rank] > state.limits[rank] * (1 + SLACK):
                break
            for stage in range(rank + 1):
                if not _run(arrays, state, DOWN, stage):
                    return False
        if not _run(arrays, state, DOWN, last - rank):
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
                    if not _run(arrays, state, DOWN, stage):
                        return False
            if not placed and state.done[DOWN, last - rank] >= many and state.done[DOWN, rank] >= many:
                return False
            second = not second
    for _ in range(2 * many):
        if not _backwards_on_v(arrays, state) or not _forwards_on_v(arrays, state):
            return False
    return _drain(arrays, state)


@compiled
def _backwards_on_v(arrays: Any, state: Any) -> bool:
    """One B on every rank: of the second half of a microbatch's way back where its input is made, else of the first."""
    ranks, many = state.limits.shape[0], state.ends.shape[2]
    last = 2 * ranks - 1
    second = state.wanted
    for rank in range(ranks):
        second[rank] = False
        if state.done[UP, rank] < state.done[UP, last - rank]:
            made = rank + 1 == ranks or _arrives(arrays, state, UP, rank) >= 0
            second[rank] = made or state.done[UP, last - rank] >= many
    for turn in range(2 * ranks):
        rank = ranks - 1 - turn if turn < ranks else turn - ranks
        if second[rank] != (turn < ranks):
            continue
        stage = rank if second[rank] else last - rank
        delay = bool(second[rank]) or state.choices.behind
        if not _run_after_weights(arrays, state, UP, stage, delay, False):
            return False
    return True


@compiled
def _forwards_on_v(arrays: Any, state: Any) -> bool:
    """One F on every rank: of the second chunk where its input is made, else of the first."""
    ranks, many = state.limits.shape[0], state.ends.shape[2]
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
        if not _run_after_weights(arrays, state, DOWN, stage, state.choices.eager, False):
            return False
    return True


@compiled
def _drain(arrays: Any, state: Any) -> bool:
    """Run the W that are still due; returns whether every pass is placed."""
    for rank in range(state.limits.shape[0]):
        while _weight(arrays, state, rank):
            pass
    for rank in range(state.limits.shape[0]):  # noqa: SIM110 - numba has no all()
        if state.length[rank] < arrays.lengths[rank]:
            return False
    return True
