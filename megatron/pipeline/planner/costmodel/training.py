"""Costs of a training on GPUs: the one way from its description to what its passes take, for a file, a table and a search."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pipeline.planner.costmodel.device import Device
from megatron.pipeline.planner.costmodel.estimate import estimate
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.families import Family
from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.gpt import Shape


def costs_of_training(
    model: ModelDescription,
    placement: Placement,
    layers: Sequence[int],
    device: Device,
    links: Links,
    family: Family | None = None,
) -> Costs:
    """Seconds and bytes of passes, without what backwards make again (``remade``).

    Args:
        layers: of every stage.
        family: of its schedule; None for costs that any family plans for, and that count no wait for messages.
    """
    split, exposed = not model.makes_weights_again, 0.0
    if family is not None:
        overlaps = family.name == "interleaved" and model.overlap_p2p_comm
        waits = model.is_stock and model.pipeline_model_parallel_size > 1 and not overlaps
        split, exposed = split and not family.fused, family.exposed_hops if waits else 0.0
    costs = estimate(Shape.of(model), placement, layers, device, model.spread, split, links, exposed)
    # A plan joins B and W where BW hides sums over tensor-parallel ranks, not to save a pass's start alone.
    return costs if fuses(model, family) else cutting.without_fused(costs)


def fuses(model: ModelDescription, family: Family | None = None) -> bool:
    """Tell whether B and W run as one pass, always or where the plan likes."""
    return bool(family and family.fused) or model.makes_weights_again or model.tensor_model_parallel_size > 1


def remade(model: ModelDescription, costs: Costs) -> Costs:
    """The costs where backwards make activations again, if they do."""
    return cutting.with_recomputation(costs, model.makes_weights_again) if Shape.of(model).policy.recomputes else costs
