"""Schedules on the V placement: ZB-V, V-Half, V-Min, 1F1B-V, and V-Auto for any memory limit.

Qi et al., "Pipeline Parallelism with Controllable Memory". Rank r holds the stages r and 2p-1-r: one of them holds its
activations long, the other briefly, so that every rank holds the same. The names stand for amounts of memory, in microbatches of
a rank's activations: p for ZB-V, floor((p+2)/2) for V-Half, floor((p+4)/3) for V-Min, and ceil(2p/3) for 1F1B-V, whose
backward is fused (half a microbatch more where 3 divides p: less does not sustain the rate). At equal costs the bubbles, in
passes of half a rank's share, are

    ZB-V    0 in the span, where m >= 2p
    V-Half  3p-7 (p even), 3p-4 (p odd)
    V-Min   4p-5, or 4p-7 where 3 divides p

at most. The published schedules repeat a building block for equal costs. Here one search makes all of them, from blocks for the
real costs (see ``search``). ``v-auto`` takes any limit from one microbatch up, by default 1F1B's p; ``zb-v`` uses more than
p if the limit allows it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.planner.schedule.core.placement import v, wave
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.families.family import Family


def plan(problem: Problem, fixed: bool = False) -> Order:
    from megatron.pipeline.planner.schedule.search.search import search  # compiles, which fixed orders do not need

    return search(problem, _known, fixed)


plan_fixed = partial(plan, fixed=True)  # for a name that stands for an amount of memory: there are no plans for other limits


def plan_fused(problem: Problem) -> Order:
    """Every backward is BW."""
    return plan_fixed(replace(problem, fused=frozenset(range(problem.placement.depth))))


def _memory_of_1f1b_v(ranks: int) -> float:
    return 2 * ranks / 3 + 0.5 if ranks % 3 == 0 else -(-2 * ranks // 3)


def _known(problem: Problem) -> Iterator[Order]:
    if problem.placement == v(problem.ranks) and not problem.recompute and not problem.fused:
        yield tuple(_zero_bubble(problem.ranks, rank, problem.microbatches) for rank in range(problem.ranks))


def _zero_bubble(ranks: int, rank: int, microbatches: int) -> tuple[Pass, ...]:
    """ZB-V in closed form, optimal for equal costs: planned for at least 2p-1 microbatches, and the surplus ones dropped."""
    planned, behind = max(microbatches, 2 * ranks - 1), ranks - rank
    order = (
        (2 * behind - 1, "F0"),
        (rank, "F1 F0"),
        (behind, "F1 B1 W1"),
        (planned - ranks, "F0 B0 W0 F1 B1 W1"),
        (rank, "B0 B1"),
        (behind, "B0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    )
    numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    row = [(*_NAMED[text], next(numbers[text])) for times, texts in order for text in times * texts.split()]
    return tuple(Pass(kind, number, chunk) for kind, chunk, number in row if number < microbatches)


_NAMED = {f"{kind}{chunk}": (kind, chunk) for kind in (Kind.F, Kind.B, Kind.W) for chunk in range(2)}

FAMILIES = (
    Family("1f1b-v", wave, plan_fused, chunks=2, memory=_memory_of_1f1b_v, memory_is="fixed", fused=True),
    Family("zb-v", wave, plan, chunks=2, memory=float, memory_is="least"),
    Family("v-half", wave, plan_fixed, chunks=2, memory=lambda p: (p + 2) // 2, memory_is="fixed"),
    Family("v-min", wave, plan_fixed, chunks=2, memory=lambda p: (p + 4) // 3, memory_is="fixed"),
    Family("v-auto", wave, plan, chunks=2, any_chunks=True, least_chunks=2, memory=float, memory_is="default", suggested=True),
)
