"""From what is asked for to a schedule: ``Request`` -> ``Problem`` -> ``Planned``.

    planned = Request("zb-h1", ranks=4, microbatches=8, memory_limit=4).plan()
    planned.schedule, planned.timeline, planned.peak, planned.gap

``plan`` is the same in one call, where the schedule is all that is needed.
"""

from collections.abc import Sequence
from typing import Any

from megatron.pipeline.planner.planning.compose import least_memory, solve
from megatron.pipeline.planner.planning.every_batch import ordered, pack
from megatron.pipeline.planner.planning.planned import Planned, Variant
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.loads import loads_of
from megatron.pipeline.planner.schedule.core.schedule import Schedule

__all__ = ["Planned", "Request", "Variant", "least_memory", "loads_of", "ordered", "pack", "plan", "solve"]


def plan(
    schedule: str,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    chunks: int | None = None,
    memory_limit: float | Sequence[float] | None = None,
    **options: Any,
) -> Schedule:
    """The schedule of a family; the arguments are the fields of a ``Request``.

    Raises:
        ValueError: the name is unknown, a number is out of range, or the schedule would hold more than the limit.
    """
    return solve(schedule, Request(schedule, ranks, microbatches, costs, chunks, memory_limit, **options).problem())
