"""Time that data-parallel replicas add to an iteration: the sum of their gradients, and new weights on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megatron.pipeline.planner.costmodel.device import Device
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.costmodel.memory import expert_copies, gathered_bytes, gradient_bytes, optimizer_parameters
from megatron.pipeline.planner.costmodel.parameters import Parameters, parameters
from megatron.pipeline.planner.schedule.core.boundary import turns
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.placement import Placement, linear
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.time.cycle import Cycle
from megatron.pipeline.planner.schedule.transforms.boundary import Rules, megatron, waits_for_norm, with_boundary
from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.trained import OUTPUT

STEP_BYTES = 34  # of a parameter: Adam reads its gradient, weight and two moments, and writes the latter, and a copy in 16 bits


def with_replicas(
    model: ModelDescription, costs: Costs, placement: Placement, layers: Sequence[int], links: Links, device: Device | None
) -> Costs:
    """Costs with what ranks do between two iterations: reductions and gathers over the replicas, steps, and the norm.

    A rank's parameters are shared out to its stages as those of the stages alone; the gradients of tied embeddings that are apart
    are summed with those of either end.

    Args:
        layers: of every stage.
        device: that steps; None where steps are counted elsewhere.
    """
    shape, tied = Shape.of(model), model.tied
    counts = [count.trained for count in parameters(shape, placement, layers, model.spread, tied)]
    alone = [max(1, count.trained.total) for count in parameters(shape, linear(len(layers)), layers)]
    copies = model.copies
    stages = list(costs.stages)
    data, expert_data = (replace(link, latency=0.0) for link in (links.data, links.expert_data))  # which each bucket has
    rings = replace(links, data=data, expert_data=expert_data)
    for row, count in zip(placement.stages, counts, strict=True):
        reduce = gather = 0.0
        if copies > 1:
            reduce = _gathered(model, rings, count, gradient_bytes(model)) * (1 if model.use_distributed_optimizer else 2)
            gather = _gathered(model, rings, count, gathered_bytes(model, count)) if model.use_distributed_optimizer else 0.0
        step = device.moving(STEP_BYTES * optimizer_parameters(model, count)) if device else 0.0
        whole = sum(alone[stage] for stage in row)
        for stage in row:
            share = alone[stage] / whole
            stages[stage] = replace(stages[stage], reduce=share * reduce, step=share * step, gather=share * gather)
    last = len(stages) - 1
    if tied and shape.trains(OUTPUT) and model.spread is None and placement.home(last)[0] != placement.home(0)[0]:
        size = gradient_bytes(model) * model.padded_vocab_size * model.hidden_size / model.tensor_model_parallel_size
        for end in (0, last):
            more = links.hop.all_reduce(size, 2)
            stages[end] = replace(stages[end], reduce=stages[end].value("reduce") + more)
    ranks = model.pipeline_model_parallel_size
    latency, norm = (copies - 1) * links.data.latency, links.hop.all_reduce(gradient_bytes(model), ranks)
    return replace(costs, stages=tuple(stages), latency=latency if copies > 1 else 0.0, norm=norm, at_once=model.at_once)


def _gathered(model: ModelDescription, links: Links, count: Parameters, size: float) -> float:
    """Seconds until all ranks with the same parameters have ``size`` bytes of each."""
    of_experts = links.expert_data.all_gather(size * count.expert, expert_copies(model)) if count.expert else 0.0
    return links.data.all_gather(size * count.dense, model.copies) + of_experts


def between_seconds(
    model: ModelDescription, links: Links, schedule: Schedule, problem: Problem, alone: float, plans: bool
) -> float:
    """Seconds of a period beyond the iteration alone: of a planned boundary, or by the rules that the flags name.

    Computation takes longer while gradients and weights are on their way (``Links.hides``): on the rank where that is most.

    Args:
        problem: with the costs of ``with_replicas``.
        alone: seconds of that iteration.
        plans: whether the training plans its boundary, where flags let reductions overlap with passes at all.
    """
    overlaps = model.overlap_grad_reduce and (model.overlap_param_gather or not model.use_distributed_optimizer)
    if plans and overlaps:
        whole, _ = with_boundary(schedule, replace(problem, quick=True))
    else:
        aligned = not plans and model.align_grad_reduce
        whole, _ = megatron(schedule, problem, [Rules(model.overlap_grad_reduce, model.overlap_param_gather, aligned)])
    cycle = Cycle(whole, problem.costs, waits_for_norm(problem))
    steady, shown = cycle.steady(turns(whole)), cycle.timeline(turns(whole))
    assert steady, "a boundary by rules or planned does not block"
    slowed = (1 - 1 / links.beside_communication) * max(_overlap(shown, rank) for rank in range(len(shown.ranks))) / 2
    return max(0.0, steady.period - alone) + slowed


def _overlap(timeline: Timeline, rank: int) -> float:
    """Seconds in which a rank computes and its lane is in use."""
    rows = (*timeline.ranks[rank], *(each for each in timeline.copies[rank] if each.work.kind.row.bucket))
    moments = sorted(moment for each in rows for moment in ((each.start, 1), (each.end, -1)))
    found, level = 0.0, 0
    for (moment, change), (after, _) in pairwise(moments):
        level += change
        found += after - moment if level == 2 else 0.0
    return found
