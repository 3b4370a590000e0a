"""Predictions of random models and layouts are numbers: finite, not negative, and weights fall as ranks share them."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from random import Random

from costmodel.drawn_shapes import shape
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from megatron.pipeline.cli.memory import quietly
from megatron.pipeline.cli.tune import base_flags
from megatron.pipeline.flags.settings import Flags
from megatron.pipeline.planner.costmodel.device import named, shipped
from megatron.pipeline.planner.costmodel.estimate import estimate
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.costmodel.parameters import parameters
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.shape.description import Ranks
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.tune.candidate import SIZES, Cluster
from megatron.pipeline.tune.iteration import Failed, evaluate
from megatron.pipeline.tune.layouts import FULL_RECOMPUTE, LayoutChoices, Layouts

GPU = named("GB200")
CONFIGS = sorted(map(str, Path(__file__).parents[2].glob("configs/**/*.yaml")))
POWERS = st.sampled_from([1, 2, 4, 8])
SHAPES = st.integers(0, 2**32).map(lambda seed: shape(Random(seed)))


@given(SHAPES, st.sampled_from([2, 4]), st.sampled_from([4, 8, 64]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_seconds_and_bytes_are_numbers(shape: Shape, ranks: int, per_node: int, split: bool) -> None:
    held, experts = shape.policy, shape.experts
    parallel, part = (experts.parallel, experts.tensor) if experts else (1, held.tensor)
    links = Links.of(GPU, per_node, Ranks(held.tensor, held.context, parallel, 8, ranks, part))
    layers = [shape.layers // ranks + (rank < shape.layers % ranks) for rank in range(ranks)]
    costs = estimate(shape, linear(ranks), layers, GPU, None, split, links)
    for stage in costs.stages:
        numbers = [value for value in astuple(stage) if isinstance(value, int | float)]
        assert all(math.isfinite(value) and value >= 0 for value in numbers), stage
        assert min(stage.forward, stage.backward, stage.weight) > 0
        assert 0 < stage.value("fused") <= stage.backward + stage.weight + 1e-12
    for again in (costs, cutting.with_recomputation(costs), cutting.with_recomputation(costs, weights=True)):
        for made in (again, cutting.shielded(again, set(range(ranks))), cutting.hidden(again), cutting.without_fused(again)):
            cutting.of_depth(made, 3 * ranks // 2)  # no part is more than its whole, or Costs refuse it


@given(SHAPES)
@settings(max_examples=50, deadline=None)
def test_more_tensor_parallel_ranks_never_have_more_weights_each(shape: Shape) -> None:
    layers = [shape.layers // 2, shape.layers - shape.layers // 2]
    held = shape.policy
    wider = replace(shape, policy=replace(held, tensor=2 * held.tensor, sequence_parallel=True))
    for few, many in zip(*(parameters(one, linear(2), layers) for one in (wider, shape)), strict=True):
        assert 0 < few.total <= many.total
        assert few.layers <= few.total


@cache
def base(path: str) -> Flags:
    with quietly():
        return base_flags(["--config", path])


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_candidate_of_the_shipped_models_can_be_planned(data: st.DataObject) -> None:
    """All but the plan itself: costs, bounds and memory of any family, layout, batch and measure that saves memory."""
    model = base(data.draw(st.sampled_from(CONFIGS)))
    ranks = {name: data.draw(POWERS) if name != "ep" or model.num_experts else 1 for name in SIZES}
    microbatch, gpu = data.draw(POWERS), replace(named(data.draw(st.sampled_from(shipped()))), memory=1e18)
    batch = ranks["dp"] * microbatch * data.draw(st.integers(1, 40))
    gpus = math.prod(ranks[name] for name in ("tp", "cp", "pp", "dp"))
    schedules = (data.draw(st.sampled_from(sorted(families.FAMILIES))),)
    on = Layouts(model | {"global_batch_size": batch}, Cluster(gpu, gpus, min(8, gpus)), LayoutChoices(schedules=schedules))
    layout = {SIZES[name]: size for name, size in ranks.items() if name != "dp"}
    layout |= {"micro_batch_size": microbatch, "sequence_parallel": ranks["tp"] > 1}
    layout |= data.draw(st.sampled_from([{}, FULL_RECOMPUTE]))
    try:
        found = list(on.candidates(layout, stock=data.draw(st.booleans())))
    except ValueError:
        reject()
    if found:
        one = data.draw(st.sampled_from(found))
        for each in (one, *on.remedies(one)):
            outcome = evaluate(on.cluster, each, beat=0.0)
            assert not isinstance(outcome, Failed), outcome
