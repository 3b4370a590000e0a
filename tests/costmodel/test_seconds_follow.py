"""Seconds follow what they are made of: what a GPU does faster takes no longer, and what is wider is no less efficient."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from costmodel.drawn_shapes import shape
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.planner.costmodel.device import Device, named, shipped
from megatron.pipeline.planner.costmodel.estimate import estimate, layer_seconds
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.schedule.core.passes import Vocabulary
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.shape.activation_policy import ITERATION, LAUNCHED
from megatron.pipeline.planner.shape.description import Ranks
from megatron.pipeline.planner.shape.gpt import Shape, Work, linear_work
from megatron.pipeline.planner.shape.precision import RECIPES, Quantized

SEEDS, GPUS = st.integers(0, 2**32), st.sampled_from(shipped())
TIMES = st.floats(1, 8)
ROUNDED = 1 + 1e-9


def drawn(seed: int, device: Device) -> Shape:
    """A model whose products the GPU has."""
    one = shape(Random(seed))
    known = {each.name for each in device.precisions}
    return replace(one, quantized=None) if one.quantized and one.quantized.recipe.peak not in known else one


def links(one: Shape, device: Device) -> Links:
    held, experts = one.policy, one.experts
    parallel, tensor = (experts.parallel, experts.tensor) if experts else (1, held.tensor)
    return Links.of(device, 8, Ranks(held.tensor, held.context, parallel, 8, 2, tensor))


def passes(one: Shape, device: Device, vocabulary: Vocabulary | None = None) -> list[float]:
    """Seconds of F, B and W of both stages, and of the passes of a sharded vocabulary."""
    split = [one.layers // 2, one.layers - one.layers // 2]
    costs = estimate(one, linear(2), split, device, vocabulary, links=links(one, device))
    own = costs.vocabulary
    stages = [seconds for stage in costs.stages for seconds in (stage.forward, stage.backward, stage.weight)]
    return [*stages, own.S, own.T, own.IF, own.IB]


def no_longer(now: list[float] | Work, before: list[float] | Work) -> bool:
    return all(one <= other * ROUNDED for one, other in zip(now, before, strict=True))


@given(SEEDS, GPUS, TIMES, TIMES, TIMES, st.sampled_from([None, *Vocabulary]))
@settings(max_examples=30, deadline=None)
def test_a_faster_gpu_makes_no_pass_longer(
    seed: int, name: str, peak: float, bandwidth: float, quantized: float, vocabulary: Vocabulary | None
) -> None:
    device = named(name)
    one = drawn(seed, device)
    others = tuple(replace(each, peak=quantized * each.peak) for each in device.precisions)
    before = passes(one, device, vocabulary)
    for faster in ({"peak": peak * device.peak}, {"bandwidth": bandwidth * device.bandwidth}, {"precisions": others}):
        assert no_longer(passes(one, replace(device, **faster), vocabulary), before), list(faster)


@given(GPUS, st.sampled_from([256, 1024, 4096]), st.integers(0, 2), st.sampled_from(["", *RECIPES]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_wider_layer_takes_no_longer_for_each_operation(name: str, seq: int, times: int, recipe: str, gated: bool) -> None:
    """The heads keep their width and number: attention itself is the same in both."""
    device = replace(named(name), latency=0.0)
    if recipe and RECIPES[recipe].peak not in {each.name for each in device.precisions}:
        recipe = ""
    each = []
    for hidden in (1024, 1024 * 2**times, 2048 * 2**times):
        one = replace(Shape.plain(4, hidden, 16, seq, 1024), head_width=64, groups=16, gated=gated)
        if recipe:
            one = replace(one, quantized=Quantized(RECIPES[recipe], (True,) * 4))
        each.append([seconds / work for seconds, work in zip(seconds_of(one, device), linear_work(one), strict=True)])
    assert no_longer(each[1], each[0]) and no_longer(each[2], each[1])


def seconds_of(one: Shape, device: Device) -> Work:
    return layer_seconds(one, device, links(one, device))


@pytest.mark.parametrize("name", [name for name in shipped() if named(name).precisions])
@given(st.sampled_from([8192, 12288, 16384]), st.sampled_from([2048, 8192]), st.booleans(), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=20, deadline=None)
def test_fewer_bits_are_no_slower_in_large_layers(name: str, hidden: int, seq: int, gated: bool, tensor: int) -> None:
    """A graph leaves the host out, which launches twice as many kernels then: it is slower where ranks share small layers."""
    device = named(name)
    plain = Shape.plain(4, hidden, hidden // 128, seq, 1024)
    policy = replace(plain.policy, tensor=tensor, sequence_parallel=tensor > 1, graphed=frozenset((ITERATION,)))
    plain = replace(plain, gated=gated, policy=policy)
    known = {each.name for each in device.precisions}
    before = sum(seconds_of(plain, device))
    for recipe in RECIPES.values():
        if recipe.peak in known:
            assert sum(seconds_of(replace(plain, quantized=Quantized(recipe, (True,) * 4)), device)) <= before * ROUNDED, recipe


@given(SEEDS, GPUS, st.sets(st.sampled_from(sorted(LAUNCHED))), st.sets(st.sampled_from(sorted(LAUNCHED))))
@settings(max_examples=50, deadline=None)
def test_cuda_graphs_make_no_pass_longer(seed: int, name: str, graphed: set[str], more: set[str]) -> None:
    device = named(name)
    one = drawn(seed, device)

    def launched(scope: set[str]) -> list[float]:
        return passes(replace(one, policy=replace(one.policy, graphed=frozenset(scope))), device)

    none, some, both, all_ = map(launched, (set(), graphed, graphed | more, {ITERATION}))
    assert no_longer(some, none) and no_longer(both, some) and no_longer(all_, both)


@pytest.mark.parametrize("hidden", [8192, 16384])
@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_an_h20_is_slower_than_an_h100(hidden: int, recipe: str | None) -> None:
    """Twice at least, though its memory is faster: it has 0.15 of the peak."""
    one = Shape.plain(4, hidden, hidden // 128, 8192, 1024)
    if recipe:
        one = replace(one, quantized=Quantized(RECIPES[recipe], (True,) * 4))
    own, other = (seconds_of(one, named(name)) for name in ("H20", "H100-80GB"))
    assert all(2 * fast < slow for slow, fast in zip(own, other, strict=True))
