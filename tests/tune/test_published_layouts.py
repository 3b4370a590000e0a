"""Layouts that NVIDIA publishes are among those that ``mpipe tune`` tries, with their recomputation, and fit into their GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.pipeline.cli.memory import predicted, quietly
from megatron.pipeline.cli.tune import base_flags
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.model.description import describe
from megatron.pipeline.planner.costmodel.device import named
from megatron.pipeline.planner.costmodel.memory import predict, usable
from megatron.pipeline.tune.candidate import SIZES, Candidate, Cluster
from megatron.pipeline.tune.layouts import LayoutChoices, Layouts

FILE = json.loads((Path(__file__).parents[2] / "benchmarks" / "published_layouts.json").read_text(encoding="utf-8"))
_SAME = ("recompute_granularity", "recompute_modules", "overlap_moe_expert_parallel_comm", "micro_batch_size")


def _of(args: Settings, layers: list[int] | tuple[int, ...], chunks: int) -> tuple[Any, ...]:
    """All that a layout is."""
    tensor = args.tensor_model_parallel_size
    values = [getattr(args, name) for name in (*SIZES.values(), *_SAME)]
    return chunks, tuple(layers), args.expert_tensor_parallel_size or tensor, *map(str, values)


def _tried(layouts: Layouts, like: Settings) -> list[Candidate]:
    """What is tried under megatron-core's own schedules in the sizes of a training."""
    sizes = [name for name in SIZES.values() if name != "data_parallel_size"] + ["micro_batch_size"]
    found = [layout for layout in layouts if all(layout[name] == getattr(like, name) for name in sizes)]
    own = [candidate for layout in found for candidate in layouts.candidates(layout, stock=True)]
    return [*own, *(other for candidate in own for other in layouts.remedies(candidate))]


@pytest.mark.parametrize(("gpu", "gpus", "flags"), [pytest.param(*row, id=name) for name, *row in FILE["rows"]])
def test_a_published_layout_is_tried_and_fits(gpu: str, gpus: int, flags: str) -> None:
    given, device = [*FILE["flags"].split(), *flags.split()], named(gpu)
    training = predicted([*given, "--pipeline-schedule", "stock"], world_size=gpus)
    ranks = predict(describe(training.args), training.schedule, training.layers, device)
    assert max(rank.total for rank in ranks) <= usable(device.memory)
    args, cluster = training.args, Cluster(device, gpus, device.node(gpus))
    choices = LayoutChoices([args.tensor_model_parallel_size], [args.pipeline_model_parallel_size])
    assert args.tensor_model_parallel_size in (1, 2, 4, 8)  # as all that are tried
    with quietly():
        found = _tried(Layouts(base_flags(given), cluster, choices), args)
    wanted = _of(args, training.layers, training.schedule.placement.chunks)
    assert wanted in [_of(one.args, one.layers, one.placement.chunks) for one in found]
