"""What a GPT has to compute, and how layers are shared out between ranks."""

from __future__ import annotations

import itertools

import pytest

from megatron.pipeline.planner.costmodel import activations
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved, linear, v
from megatron.pipeline.planner.shape import gpt
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.stages import balanced_layers, heaviest

K = 1024


def shape(seq: int = 2048, vocabulary: int = 32 * K) -> Shape:
    """The model of 4B parameters that vocabulary parallelism was published with."""
    return Shape.plain(32, 3072, 24, seq, vocabulary)


@pytest.mark.parametrize("seq", [2048, 4096])
def test_closed_forms(seq: int) -> None:
    """Those of the papers, for a plain GPT of b = 1."""
    given = shape(seq)
    h, length, rows = given.hidden, given.layers, given.vocabulary
    layer = gpt.layer_work(given)
    assert layer == (seq * h * (24 * h + 4 * seq), seq * h * (24 * h + 8 * seq), seq * h * 24 * h)
    narayanan = 72 * length * seq * h * h * (1 + seq / (6 * h) + rows / (12 * length * h))
    assert given.training_operations() == pytest.approx(narayanan)
    assert given.output_in_layers() == pytest.approx(rows / (12 * h + 2 * seq))
    assert activations.layer_activation(given) == 34 * seq * h
    assert given.layer_weights == 12 * h * h


PUBLISHED = {32: 4, 64: 3, 128: 2, 256: 0}  # layers of the last of 8 stages, by thousands of rows


@pytest.mark.parametrize("seq", [2048, 4096])
def test_the_published_redistribution(seq: int) -> None:
    """Chosen by Narayanan's operations, in which layers recompute.

    Without recomputation one differs: a last stage with 128k rows and 2 layers has the work of 5.2, more than any other.
    """
    for recompute in (True, False):
        for thousands, published in PUBLISHED.items():
            extra = {7: shape(seq, thousands * K).output_in_layers(recompute)}
            layers = balanced_layers(32, linear(8), extra)
            differs = not recompute and (thousands, seq) == (128, 2048)
            assert layers[-1] == (1 if differs else published)
            if differs:
                assert heaviest(layers, linear(8), extra) == 5 < published + extra[7]


@pytest.mark.parametrize("placement", [linear(4), interleaved(2, 2), interleaved(2, 3), v(2)], ids=lambda p: str(p.stages))
@pytest.mark.parametrize("extra", [0.0, 0.6, 2.4, 9.0])
def test_no_other_way_has_a_lighter_heaviest_rank(placement: Placement, extra: float) -> None:
    stages, layers = placement.last_stage + 1, 9
    given = {placement.last_stage: extra}
    found = balanced_layers(layers, placement, given)
    ways = (
        [first, *rest, layers - first - sum(rest)]
        for first in range(layers + 1)
        for rest in itertools.product(range(1, layers + 1), repeat=stages - 2)
        if first + sum(rest) <= layers
    )
    assert sum(found) == layers and min(found[1:-1]) >= 1
    assert heaviest(found, placement, given) == min(heaviest(way, placement, given) for way in ways)


def test_stages_between_the_ends_need_a_layer() -> None:
    with pytest.raises(ValueError, match=r"^cannot be split over 4 .* give at least 2 layers"):
        balanced_layers(1, linear(4), {3: 1.0})
