"""Layers of every stage of a model: how many there can be of each, and which these are.

All that planning counts of layers is here: a split under which the heaviest rank is as light as possible; the layers' numbers,
from the counts of a split; and how many of them a rank has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from megatron.pipeline.planner.schedule.core.placement import Placement


def numbers_of_layers(counts: Sequence[int]) -> list[range]:
    """Numbers of the layers of every stage, from 0 in the model's order.

    Args:
        counts: layers of every stage.
    """
    return [range(first, end) for first, end in pairwise(accumulate(counts, initial=0))]


def layers_of_ranks(counts: Sequence[int], placement: Placement) -> list[int]:
    """Layers of every rank, with those of every stage as ``numbers_of_layers`` takes them."""
    return [sum(counts[stage] for stage in stages) for stages in placement.stages]


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
