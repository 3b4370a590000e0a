"""How good can a schedule be? A bound below which no order of the passes can bring the span."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from megatron.pipeline.schedule.costs import Costs, StageCosts
from megatron.pipeline.schedule.placement import Placement
from megatron.pipeline.schedule.problem import Problem


def lower_bound(problem: Problem) -> float:
    """A span that no schedule can beat: every order of F, B, W or BW that keeps the dependencies and the limit takes longer.

    The span is at least that of every rank, counted from its first pass. For one rank, with ``work`` the seconds of all
    its passes:

    * Head: its first B cannot start before a microbatch went from the rank's first stage to the model's last and back to
      the rank's last stage. Until then it can only run F, and only as many as fit into memory. The rest is idle.
    * Tail: after its last F ends, that microbatch still has to go forward to the model's last stage and back through the
      rank's first stage. From then on it can only run B and W of what it held in memory. The rest is idle.
    * Head and tail overlap only if the rank ran all its F before its first B. Where the span is known to be at least
      head + tail, or memory cannot hold all microbatches at once, they do not, and both idle times count.
    * One microbatch alone takes its whole way from the rank's first stage and back.
    * Memory: activations occupy memory for at least their way to the last stage and back. Their sum over all
      microbatches, size times seconds, has to fit into limit times span.

    For equal stages and m > p, and where its closed form holds, this is the span of ZB-H1 if B frees nothing: no schedule
    with the memory of 1F1B is better.

    Returns:
        Seconds (the unit of the costs); infinite if not even one microbatch fits into the limit.
    """
    limits = problem.limits or [None] * problem.ranks
    return max(
        _rank_bound(problem.placement, rank, problem.microbatches, problem.costs, limit) for rank, limit in enumerate(limits)
    )


class _Load(NamedTuple):
    """Something that occupies memory and gives a rank work to do."""

    size: float
    seconds: float


def _rank_bound(placement: Placement, rank: int, microbatches: int, costs: Costs, limit: float | None) -> float:
    homes = [placement.home(stage)[0] for stage in range(placement.last_stage + 1)]
    hops = [costs.hop if here != there else 0 for here, there in pairwise(homes)]

    def to_end(stage: int) -> float:
        """From the start of F on a stage to the end of F on the last one."""
        return sum(cost.forward for cost in costs.stages[stage:]) + sum(hops[stage:])

    def from_end(stage: int) -> float:
        """From the start of B on the last stage to the end of B on this one."""
        return sum(cost.backward for cost in costs.stages[stage:]) + sum(hops[stage:])

    mine = [costs.stages[stage] for stage in placement.stages[rank]]
    first, last = min(placement.stages[rank]), max(placement.stages[rank])
    weight = costs.stages[first].weight
    work = microbatches * sum(cost.total for cost in mine)
    whole = to_end(first) + from_end(first) + weight
    head = to_end(first) + from_end(last) - costs.stages[last].backward
    tail = to_end(last) - costs.stages[last].forward + from_end(first) + weight
    before_head = microbatches * sum(cost.forward for cost in mine)
    after_tail = microbatches * sum(cost.backward + cost.weight for cost in mine)
    area: float = 0
    apart = False

    if limit is not None:
        room = _usable(limit, mine)
        microbatch = sum(cost.activation for cost in mine)
        if room < microbatch:
            return math.inf  # on its way back from the last stage, a microbatch occupies all of the rank's stages
        apart = room < microbatches * microbatch
        before_head = _most([_Load(cost.activation, cost.forward) for cost in mine], microbatches, room)
        loads = [_Load(cost.activation, cost.backward + cost.weight) for cost in mine]
        loads += [_Load(cost.retained, cost.weight) for cost in mine]
        after_tail = min(after_tail, _most(loads, microbatches, room))
        if room > 0:
            held = (
                costs.stages[stage].activation * (to_end(stage) + from_end(stage))
                + costs.stages[stage].retained * costs.stages[stage].weight
                for stage in placement.stages[rank]
            )
            area = microbatches * sum(held) / room

    idle_head, idle_tail = max(0, head - before_head), max(0, tail - after_tail)
    span = max(whole, work + idle_head, work + idle_tail, area)
    return max(span, work + idle_head + idle_tail) if apart or span >= head + tail else span


def _usable(limit: float, stages: list[StageCosts]) -> float:
    """How much of the limit can be filled: whole units, where everything that is held has the same size."""
    sizes = {size for cost in stages for size in (cost.activation, cost.retained) if size > 0}
    if len(sizes) != 1:
        return limit
    (size,) = sizes
    return (limit + limit / 10**9) // size * size  # the billionth forgives float sums: a larger limit keeps the bound valid


def _most(loads: list[_Load], count: int, room: float) -> float:
    """The most seconds of work that fit into the room, with up to ``count`` of every load, parts of one allowed."""
    seconds: float = 0
    for load in sorted(loads, key=lambda load: load.seconds / load.size if load.size else math.inf, reverse=True):
        number = min(count, room / load.size) if load.size else count
        room -= number * load.size
        seconds += number * load.seconds
    return seconds
