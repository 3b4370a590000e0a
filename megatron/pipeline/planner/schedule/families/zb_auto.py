"""ZB-Auto: the best order that the planner finds for F, B and W at real costs, hops and memory limit.

Qi et al., "Zero Bubble Pipeline Parallelism", section 3; the method used here is described in ``search``. Without a limit it
takes the memory of 1F1B. The search begins with ZB-H1 and ZB-H2, and with several chunks per rank with gis and gis-h (unless the
problem is very long), so the result is never longer than those of them that fit into the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.pipeline.planner.schedule.core.passes import Order
from megatron.pipeline.planner.schedule.core.placement import interleaved
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.families import gis
from megatron.pipeline.planner.schedule.families.family import Family
from megatron.pipeline.planner.schedule.families.zb_h1 import delayed_weights

_LONG = 10_000  # microbatches times stages above which gis takes longer to plan than the search


def plan(problem: Problem) -> Order:
    from megatron.pipeline.planner.schedule.search.search import search  # compiles, which fixed orders do not need

    return search(problem, _known)


def _known(problem: Problem) -> Iterator[Order]:
    if problem.placement.chunks > 1:
        if problem.microbatches * problem.placement.last_stage > _LONG:
            return
        for group in sorted({problem.ranks, -(-problem.ranks // 2)}):
            yield gis.plan(replace(problem, group=group))
    elif not problem.recompute and not problem.fused:
        for depth in (1, 2):
            yield delayed_weights(problem.ranks, problem.microbatches, depth)


FAMILY = Family("zb-auto", interleaved, plan, any_chunks=True, memory=float, memory_is="default", suggested=True)
