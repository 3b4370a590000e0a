"""What is predicted of random models stays what it was: seconds and bytes in ``golden.json``, which can be written anew:

PYTHONPATH=tests .venv/bin/python -m costmodel.test_golden
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from random import Random

import pytest
from costmodel.drawn_shapes import shape

from megatron.pipeline.planner.costmodel import activations
from megatron.pipeline.planner.costmodel.device import named, shipped
from megatron.pipeline.planner.costmodel.estimate import estimate
from megatron.pipeline.planner.costmodel.links import Links, exchange_seconds
from megatron.pipeline.planner.costmodel.parameters import parameters
from megatron.pipeline.planner.schedule.core.passes import Vocabulary
from megatron.pipeline.planner.schedule.core.placement import linear, v
from megatron.pipeline.planner.shape.description import Ranks

GOLDEN = Path(__file__).with_name("golden.json")
CASES = 250


def predicted(seed: int) -> Iterator[float]:
    """All of a model on a cluster: each number of stages and ranks, weighed by its place."""
    draw = Random(f"prediction {seed}")
    gpus = [name for name in shipped() if not name.startswith("RTX")]  # those there were when the numbers were written
    given, device = shape(draw), replace(named(draw.choice(gpus)), forward=draw.choice([1.0, 1.3]))
    if given.quantized and given.quantized.recipe.peak not in {one.name for one in device.precisions}:
        given = replace(given, quantized=None)
    ranks, experts, held = draw.choice([2, 4]), given.experts, given.policy
    shared = (experts.parallel, experts.tensor) if experts else (1, held.tensor)
    links = Links.of(device, draw.choice([4, 8, 64]), Ranks(held.tensor, held.context, shared[0], 8, ranks, shared[1]))
    placement = draw.choice([linear, v])(ranks)
    layers = [given.layers // placement.depth + (stage < given.layers % placement.depth) for stage in range(placement.depth)]
    vocabulary, split = draw.choice([None, None, *Vocabulary]), draw.random() < 0.5
    costs = estimate(given, placement, layers, device, vocabulary, split, links, draw.choice([0.0, 0.5]))
    for values in zip(*(astuple(stage)[:-1] for stage in costs.stages), strict=True):  # no model predicts slow ranks
        yield sum(place * (value or 0.0) for place, value in enumerate(values, 1))
    yield from (costs.hop, *(value or 0.0 for value in astuple(costs.vocabulary)))
    counts = parameters(given, placement, layers, vocabulary, draw.random() < 0.5)
    for values in zip(*(astuple(count)[:4] for count in counts), strict=True):  # nothing is frozen
        yield sum(place * value for place, value in enumerate(values, 1))
    yield from (activations.layer_temporary(given), activations.layer_temporary(given, True), activations.exchanged_bytes(given))
    yield from (exchange_seconds(given, links), given.training_operations(), activations.output_temporary(given, 1))


def numbers() -> list[list[float]]:
    return [[float(f"{number:.9g}") for number in predicted(seed)] for seed in range(CASES)]


def test_predictions_are_what_they_were() -> None:
    changed = {seed: now for seed, (was, now) in enumerate(zip(json.loads(GOLDEN.read_text()), numbers(), strict=True))
               if now != pytest.approx(was, rel=1e-6, abs=1e-12)}  # fmt: skip
    assert not changed, f"{len(changed)} of {CASES} differ, the first of seed {min(changed)}; if that is meant, write them anew"


if __name__ == "__main__":
    GOLDEN.write_text("[\n" + ",\n".join(map(json.dumps, numbers())) + "\n]\n")
