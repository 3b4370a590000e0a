"""Plans of a training at other costs, as its process makes them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pipeline.planner.planning.aside import plan_batch
from megatron.pipeline.planner.planning.plan_cache import PlanCache
from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.schedule.core.costs import Costs


def planned_again(plans: PlanCache, costs: Costs, limit: float | Sequence[float] | None = None) -> dict[int, Planned]:
    """See ``BackgroundPlanner.again``."""
    used = {} if plans.offload else plans.planned
    requests = plans.again(costs, limit)
    return {number: plan_batch(request, plans.posting, used=used.get(number)).planned for number, request in requests.items()}
