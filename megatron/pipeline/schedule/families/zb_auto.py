"""ZB-Auto: the best order that the planner finds for F, B and W at real costs, hops and memory limit.

Qi et al., "Zero Bubble Pipeline Parallelism", section 3, asks for such a schedule; how it is found here is described in
``search``. Without a limit it takes the memory of 1F1B. ZB-H1 and ZB-H2 are among the plans that it begins with, so it is
never longer than they are where they fit into the limit.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron.pipeline.schedule.families.family import Family, Order
from megatron.pipeline.schedule.families.zb_h1 import delayed_weights
from megatron.pipeline.schedule.placement import interleaved
from megatron.pipeline.schedule.problem import Problem


def plan(problem: Problem) -> Order:
    from megatron.pipeline.schedule.search.search import search  # compiles, which fixed orders do not need

    return search(problem, _known)


def _known(problem: Problem) -> Iterator[Order]:
    if problem.placement.chunks == 1 and not problem.recompute and not problem.fused:
        for depth in (1, 2):
            yield delayed_weights(problem.ranks, problem.microbatches, depth)


FAMILY = Family("zb-auto", interleaved, plan, any_chunks=True, memory=float, memory_is="default")
