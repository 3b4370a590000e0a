"""The times of a layer from the costs that a rehearsal has measured of whole stages."""

from __future__ import annotations

from statistics import median

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.shape.gpt import Work
from megatron.pipeline.tune.measure.rank import Timing
from megatron.pipeline.tune.measure.sizes import Size


def timing(costs: Costs, layers: int, size: Size) -> Timing:
    """A layer's, as a median over the stages between the first and the last, which have other work besides.

    Args:
        costs: of stages with the same number of layers each, in seconds and bytes.
        layers: of the model.
        size: of the layers that were rehearsed.

    Raises:
        ValueError: the stages are too few, or no such number of layers has them; or they have no W.
    """
    stages, inner = len(costs.stages), costs.stages[1:-1]
    if not inner:
        raise ValueError(
            f"{stages} stages, and the first and the last have embedding and output layer besides: rehearse with 3 stages or "
            "more, as --pipeline-schedule zb-v has on 2 ranks"
        )
    if layers % stages:
        raise ValueError(
            f"{layers} layers are not spread evenly over {stages} stages: give the model's flags as it was rehearsed"
        )
    if not all(stage.forward > 0 and stage.backward > 0 and stage.weight > 0 for stage in inner):
        raise ValueError(
            "F, B and W must each take time, and some take none: rehearse a schedule that splits the backward, as zb-h1"
        )
    each = layers // stages

    def of_layer(name: str) -> float:
        return median(getattr(stage, name) for stage in inner) / each

    return Timing(size, Work(of_layer("forward"), of_layer("backward"), of_layer("weight")), of_layer("activation"))
