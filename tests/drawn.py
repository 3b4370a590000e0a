"""What the tests of pictures draw."""

from __future__ import annotations

from dataclasses import replace

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, uniform
from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.time.simulate import simulate


def timeline(name: str, ranks: int, microbatches: int) -> Timeline:
    schedule = planning.plan(name, ranks, microbatches)
    return simulate(schedule, uniform(schedule.placement))


def offloaded() -> tuple[Schedule, Costs]:
    """1F1B on 2 ranks, whose first one has its first two microbatches in host memory for a while."""
    plain = planning.plan("1f1b", 2, 3)
    rows = ["F0.0 F1.0 D2H0.0 D2H1.0 H2D0.0 BW0.0 F2.0 H2D1.0 BW1.0 BW2.0", " ".join(map(str, plain.passes[1]))]
    passes = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    costs = uniform(plain.placement, forward=4, backward=4, weight=4)
    return replace(plain, passes=passes), replace(costs, copies=CopyCosts(to_host=4, to_device=2))
