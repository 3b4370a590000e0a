"""Stock at its best: what megatron-core's own schedules make of the costs that another schedule was measured or planned at."""

from __future__ import annotations

from megatron.pipeline.planning.choose import NEAR
from megatron.pipeline.planning.costs import with_whole_vocabulary
from megatron.pipeline.planning.planned import Planned, Variant
from megatron.pipeline.planning.request import MOST_CHUNKS, Request
from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.problem import Objective


def stock_at_its_best(costs: Costs, ranks: int, microbatches: int, layers: int | None = None) -> Planned:
    """The shortest of 1F1B and interleaved 1F1B with up to ``MOST_CHUNKS`` chunks per rank, the fewest chunks where they are
    equal.

    Args:
        costs: of any number of stages, cut again as ``Costs.of_depth`` does; a spread vocabulary goes back to the ends.
        layers: of the model: a number of chunks counts only if all stages get as many of them. None: every number counts.
    """
    gathered = with_whole_vocabulary(costs, ranks)
    best: Planned | None = None
    for chunks in range(1, MOST_CHUNKS + 1):
        stages = ranks * chunks
        divides = microbatches % ranks == 0 and (layers is None or layers % stages == 0)
        if chunks > 1 and (ranks == 1 or not divides):
            continue
        name = Variant("interleaved", chunks) if chunks > 1 else Variant("1f1b")
        request = Request(name.name, ranks, microbatches, gathered.of_depth(stages), name.chunks, objective=Objective.MAKESPAN)
        planned = request.plan()
        if best is None or planned.value * NEAR < best.value:
            best = planned
    assert best is not None
    return best
