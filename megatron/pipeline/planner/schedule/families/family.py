"""A family of schedules: a name, a placement, and one function that orders the passes of a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron.pipeline.planner.schedule.core.passes import Order
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.problem import Problem

__all__ = ["Family"]


@dataclass(frozen=True)
class Family:
    """A family of schedules.

    Attributes:
        name: what a user writes, such as ``zb-h1``.
        placement: from (ranks, chunks) to the placement that the family uses.
        plan: from a problem on that placement to the ordered passes of every rank. A family with a fixed order ignores costs
            and limits; a plan above the limits is refused later. It may also ignore ``recompute`` and ``fused``: missing R
            are added, and backwards fused, afterwards.
        chunks: chunks per rank when the user does not say.
        any_chunks: whether other numbers of chunks, of at least ``least_chunks``, are allowed.
        splits: slices per microbatch when the user does not say; other numbers are allowed where it is above 1.
        grouped: whether the family takes a ``group``.
        memory: from the number of ranks p to the limit when the user sets none: 1F1B's peak for p, and as many p-th parts of it
            for another amount. None for as much as the order takes.
        memory_is: how a user's limit changes that: ``fixed``, it may not be lower, and more is not used; ``least``, it may
            not be lower, and more is used; ``default``, it may be lower or higher.
        keeps: the same of a family with a fixed order but for W, which runs sooner where a limit has no room: the limit counts
            where the order takes more.
        fused: whether every backward of the family is BW, never split into B and W.
        exposed_hops: for how many hops a rank waits in every F and every B where megatron-core's own function runs this order:
            1 for both directions of 1F1B; 0.5 for interleaved without overlap, which sends those of an F and a B at once.
        suggested: whether ``mpipe tune`` tries the family where the user names none.
    """

    name: str
    placement: Callable[[int, int], Placement]
    plan: Callable[[Problem], Order]
    chunks: int = 1
    any_chunks: bool = False
    least_chunks: int = 1
    splits: int = 1
    grouped: bool = False
    memory: Callable[[int], float] | None = None
    memory_is: Literal["fixed", "least", "default"] = "default"
    keeps: Callable[[int], float] | None = None
    fused: bool = False
    exposed_hops: float = 0.0
    suggested: bool = False

    @property
    def plans_for_limits(self) -> bool:
        """Tell whether it plans another order for another limit, instead of having one order for all limits."""
        return self.memory is not None and self.memory_is == "default"

    @property
    def searches(self) -> bool:
        """Tell whether it searches for an order, which takes at least a hundred times as long as a fixed order."""
        return self.memory is not None or (self.grouped and not self.fused)

    @property
    def uses_limits(self) -> bool:
        """Tell whether a higher limit may change its schedule."""
        return self.memory is not None and self.memory_is != "fixed"
