"""Number of layers of every stage, so that the heaviest rank is as light as possible."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.pipeline.planner.schedule.core.placement import Placement


def balanced_layers(layers: int, placement: Placement, extra: Mapping[int, float]) -> list[int]:
    """Layers of every stage, in the model's order.

    Every stage between the first and the last needs one. The others go, one by one, each to the lightest rank, and there to its
    lightest stage. Layers are alike, so no other way to share these out has a lighter heaviest rank: each rank
    that got one was the lightest then. Of equally light ranks the last gets it: under 1F1B it holds the fewest microbatches.

    Args:
        extra: what else a stage has to do, in layers: the output layer, and what hangs on it.

    Raises:
        ValueError: there are fewer layers than stages that need one.
    """
    middle = range(1, placement.last_stage)
    if layers < len(middle):
        raise ValueError(
            f"--num-layers {layers} cannot be split over {placement.ranks} pipeline ranks with {placement.last_stage + 1} "
            f"stages: only the first and the last can do without any, so give at least {len(middle)}, "
            "or lower --pipeline-model-parallel-size"
        )
    counts = [int(stage in middle) for stage in range(placement.last_stage + 1)]
    loads = [count + extra.get(stage, 0.0) for stage, count in enumerate(counts)]
    for _ in range(layers - len(middle)):
        row = min(reversed(placement.stages), key=lambda row: sum(loads[stage] for stage in row))
        stage = min(sorted(row, reverse=True), key=loads.__getitem__)
        loads[stage] += 1
        counts[stage] += 1
    return counts


def heaviest(counts: list[int], placement: Placement, extra: Mapping[int, float]) -> float:
    """Work of the heaviest rank, in layers."""
    return max(sum(counts[stage] + extra.get(stage, 0.0) for stage in row) for row in placement.stages)
