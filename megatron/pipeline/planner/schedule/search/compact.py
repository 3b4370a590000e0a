"""Compaction: every pass moves into the earliest idle time of its rank that is long enough, without delaying another pass.

Unlike list scheduling this keeps the order of all other passes. So it shortens the two ends of a repeated building block and
leaves its middle alone. Qi et al., "Pipeline Parallelism with Controllable Memory", section 3.3, do the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron.pipeline.planner.schedule.core.compiled import compiled
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.search.engine import arrival
from megatron.pipeline.planner.schedule.search.instance import Instance, Plan
from megatron.pipeline.planner.schedule.time.orders import Array


class MovingPasses(NamedTuple):
    """Passes that move to earlier times.

    Attributes:
        order, ends: of the plan.
        held: float[P, N], of every rank after each of its passes.
        idle: float[P, N], idle seconds of every rank up to the start of each of its passes.
        seen: int[P], how many passes of every rank have had their turn, so that the next is most often at that place.
        gap: int[P], the place behind the last idle time of every rank before the pass whose turn it is.
    """

    order: Array
    ends: Array
    held: Array
    idle: Array
    seen: Array
    gap: Array


def compact(instance: Instance, plan: Plan, limits: Array) -> Plan:
    """The plan compacted from its start and from its end in turn, until that makes it no shorter."""
    best = _once(instance, plan, limits)
    while True:
        turned = instance.reversed.replay(instance.turned(best.order))
        assert turned is not None, "an order that can run can run backwards"
        back = instance.replay(instance.turned(_once(instance.reversed, turned, limits).order))
        assert back is not None, "an order that can run backwards can run"
        shorter = _once(instance, back, limits)
        if shorter.value >= best.value * (1 - SLACK):
            return best
        best = shorter


def _once(instance: Instance, plan: Plan, limits: Array) -> Plan:
    starts = plan.ends - instance.seconds
    by_start = instance.numbers[np.argsort(starts.ravel()[instance.numbers], kind="stable")]
    shape = plan.order.shape[:2]
    moving = MovingPasses(plan.order.copy(), plan.ends.copy(), *np.zeros((2, *shape)), *np.zeros((2, shape[0]), np.int64))
    if not _compact(instance.arrays._replace(hops=plan.hops), limits, by_start, moving):
        return plan
    compacted = instance.replay(moving.order)
    # Where two times differ by no more than a rounding error, a pass may have moved before one that it needs.
    return compacted if compacted is not None and compacted.value <= plan.value else plan


@compiled
def _compact(arrays: Any, limits: Array, by_start: Array, moving: Any) -> int:  # noqa: PLR0912, PLR0915 - one compiled loop
    """Change orders and ends in place, pass by pass in the order of their starts; returns how many passes moved."""
    home, seconds, allocated, lengths = arrays.home, arrays.seconds, arrays.allocated, arrays.lengths
    order, ends, held, idle, seen, gap = moving.order, moving.ends, moving.held, moving.idle, moving.seen, moving.gap
    stages, many = ends.shape[1], ends.shape[2]
    moved = 0
    for rank in range(lengths.shape[0]):
        _account(arrays, moving, rank, 0, lengths[rank])
    for number in by_start:
        kind, stage, index = number // (stages * many), number // many % stages, number % many
        rank, takes, row = home[stage], allocated[kind, stage, index], order[home[stage]]
        start = ends[kind, stage, index] - seconds[kind, stage, index]
        slot, seen[rank] = seen[rank], seen[rank] + 1
        ready = max(ends[kind, stage, index - 1] if index > 0 else 0.0, arrival(kind, stage, index, arrays, ends))
        slack = SLACK * (1 + start)
        if ready >= start - slack:
            continue
        slot = _find(row, slot, lengths[rank], kind, stage, index)
        behind = min(gap[rank], slot)
        while behind < slot and idle[rank, slot] - idle[rank, behind] > slack:
            behind += 1
        while behind > 0 and idle[rank, slot] - idle[rank, behind - 1] <= slack:
            behind -= 1
        gap[rank] = behind
        if behind < slot:
            last, last_stage, last_index = row[behind]
            if (
                ends[last, last_stage, last_index] - seconds[last, last_stage, last_index]
                < ready + seconds[kind, stage, index] - slack
            ):
                continue  # no idle time to move into: the common case, which has to be quick
        place = _first_from(row, slot, ready + seconds[kind, stage, index] - slack, ends, seconds)
        while place < slot and ends[row[place, 0], row[place, 1], row[place, 2]] <= ready + slack:
            place += 1  # passes of no duration, which it may need
        if idle[rank, slot] - (idle[rank, place - 1] if place else 0.0) <= slack:
            continue
        if takes > 0:
            full = slot - 1  # the last place after which its memory does not fit
            while full >= place - 1 and full >= 0 and held[rank, full] + takes <= limits[rank] * (1 + SLACK):
                full -= 1
            if full >= place - 1 and full >= 0:
                place = full + 2
        while place < slot:
            begin = ready if place == 0 else max(ready, ends[row[place - 1, 0], row[place - 1, 1], row[place - 1, 2]])
            other, its_stage, its_index = row[place]
            after = ends[other, its_stage, its_index] - seconds[other, its_stage, its_index]
            if begin + seconds[kind, stage, index] <= after + slack:
                break
            place += 1
        if place >= slot:
            begin = ready if slot == 0 else max(ready, ends[row[slot - 1, 0], row[slot - 1, 1], row[slot - 1, 2]])
            if begin < start - slack:
                moved += 1
                ends[kind, stage, index] = begin + seconds[kind, stage, index]
                _account(arrays, moving, rank, slot, min(slot + 2, lengths[rank]))
            continue
        moved += 1
        _move(row, slot, place)
        ends[kind, stage, index] = begin + seconds[kind, stage, index]
        _account(arrays, moving, rank, place, min(slot + 2, lengths[rank]))
    return moved


@compiled
def _move(row: Array, slot: int, place: int) -> None:
    """Move a pass of a row to an earlier place."""
    kind, stage, index = row[slot]
    for at in range(slot, place, -1):
        row[at, 0], row[at, 1], row[at, 2] = row[at - 1, 0], row[at - 1, 1], row[at - 1, 2]
    row[place, 0], row[place, 1], row[place, 2] = kind, stage, index


@compiled
def _first_from(row: Array, length: int, time: float, ends: Array, seconds: Array) -> int:
    """The first of ``length`` passes that starts at a time or later."""
    low, high = 0, length
    while low < high:
        middle = (low + high) // 2
        kind, stage, index = row[middle]
        if ends[kind, stage, index] - seconds[kind, stage, index] < time:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _find(row: Array, slot: int, length: int, kind: int, stage: int, index: int) -> int:
    """The place of a pass in its row: looked for from ``slot`` on, then from the beginning (starts can be off by rounding)."""
    for _ in range(length + 1):
        if slot < length and row[slot, 0] == kind and row[slot, 1] == stage and row[slot, 2] == index:
            break
        slot = slot + 1 if slot < length else 0
    return slot


@compiled
def _account(arrays: Any, moving: Any, rank: int, begin: int, end: int) -> None:
    """Fill in what a rank holds after each of its passes from ``begin`` to ``end``, and how long it was idle before each."""
    ends, row, held, idle = moving.ends, moving.order[rank], moving.held[rank], moving.idle[rank]
    level, waited, free = 0.0, 0.0, 0.0
    if begin:
        level, waited = held[begin - 1], idle[begin - 1]
        free = ends[row[begin - 1, 0], row[begin - 1, 1], row[begin - 1, 2]]
    for place in range(begin, end):
        kind, stage, index = row[place]
        level += arrays.allocated[kind, stage, index]
        waited += max(0.0, ends[kind, stage, index] - arrays.seconds[kind, stage, index] - free)
        free = ends[kind, stage, index]
        held[place], idle[place] = level, waited
