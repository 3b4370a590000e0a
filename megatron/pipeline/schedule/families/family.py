"""What a family of schedules is: a name, a placement, and one function that orders the passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.pipeline.schedule.costs import Costs
from megatron.pipeline.schedule.passes import Pass
from megatron.pipeline.schedule.placement import Placement

Order = tuple[tuple[Pass, ...], ...]


@dataclass(frozen=True)
class Family:
    """A family of schedules.

    Attributes:
        name: what a user writes, such as ``zb-h1``.
        placement: from (ranks, chunks) to the placement that the family uses.
        plan: from (placement, microbatches, costs, memory limit of every rank or None) to the ordered passes of every
            rank. A family without choices ignores costs and limit; the registry refuses a plan above the limit.
        chunks: chunks per rank when the user does not say.
        any_chunks: whether other numbers of chunks are allowed.
    """

    name: str
    placement: Callable[[int, int], Placement]
    plan: Callable[[Placement, int, Costs, list[float] | None], Order]
    chunks: int = 1
    any_chunks: bool = False
