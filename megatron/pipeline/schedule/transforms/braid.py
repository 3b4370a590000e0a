"""Braids: a forward and the backward of another microbatch or chunk run as one. The collectives of one run while the other computes,
as in DualPipe and with megatron-core's ``overlap_moe_expert_parallel_comm``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from megatron.pipeline.schedule.core.kinds import BRAIDED
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.problem import Problem
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.time.replay import Stuck, dependency_order
from megatron.pipeline.schedule.time.simulate import simulate


def can_be_braided(first: Pass, second: Pass) -> bool:
    """Whether two passes that follow each other on a rank are halves of a braid, as far as that follows from themselves."""
    return first.kind is Kind.F and second.kind in BRAIDED and first[1:3] != second[1:3]


def braid(schedule: Schedule, problem: Problem) -> Schedule:
    """The same order of passes, with braids where these make it no longer: a pair is kept alone where the forward would wait for
    the gradient of the backward for longer than the braid saves.

    A schedule with slices or parts stays as it is.
    """
    if schedule.splits > 1 or any(row.is_divided for row in schedule.rows):
        return schedule
    best, length = schedule, problem.value(simulate(schedule, problem.costs))
    for rank, slot in _pairs(schedule):
        tried = _with(best, rank, slot)
        try:
            dependency_order(tried)
        except Stuck:
            continue
        tried_length = problem.value(simulate(tried, problem.costs))
        if tried_length <= length:
            best, length = tried, tried_length
    return best


def unbraided(schedule: Schedule) -> Schedule:
    """The same order of passes, each alone."""
    if not any(row.is_braided for row in schedule.rows):
        return schedule
    alone = {braided: kind for kind, braided in BRAIDED.items()}
    rows = (tuple(work._replace(kind=alone.get(work.kind, work.kind)) for work in row) for row in schedule.passes)
    return replace(schedule, passes=tuple(rows))


def _pairs(schedule: Schedule) -> list[tuple[int, int]]:
    """(rank, slot of the backward) of all pairs that could be braids; no pass is in two."""
    found = []
    for rank, row in enumerate(schedule.passes):
        taken = -1
        for slot, (first, second) in enumerate(pairwise(row), start=1):
            if slot - 1 > taken and can_be_braided(first, second):
                found.append((rank, slot))
                taken = slot
    return found


def _with(schedule: Schedule, rank: int, slot: int) -> Schedule:
    row = list(schedule.passes[rank])
    row[slot] = row[slot]._replace(kind=BRAIDED[row[slot].kind])
    return replace(schedule, passes=(*schedule.passes[:rank], tuple(row), *schedule.passes[rank + 1 :]))
