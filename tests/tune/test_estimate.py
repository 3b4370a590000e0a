"""What a GPT has to compute and to hold, what its passes cost, and how layers are shared out between ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from megatron.pipeline.planner.costmodel import activations, traffic
from megatron.pipeline.planner.costmodel.device import Device, named
from megatron.pipeline.planner.costmodel.estimate import computing_seconds, estimate, layer_seconds
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.costmodel.parameters import parameters
from megatron.pipeline.planner.schedule.core.passes import Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved, linear, v
from megatron.pipeline.planner.shape import gpt
from megatron.pipeline.planner.shape.activation_policy import ActivationPolicy
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.stages import balanced_layers

K = 1024
DEVICE = named("A100-80GB")


def heaviest(counts: Sequence[int], placement: Placement, extra: Mapping[int, float]) -> float:
    """Work of the heaviest rank, in layers."""
    return max(sum(counts[stage] + extra.get(stage, 0.0) for stage in row) for row in placement.stages)


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
    with pytest.raises(ValueError, match=r"--num-layers 1 cannot be split over 4 .* give at least 2"):
        balanced_layers(1, linear(4), {3: 1.0})


@pytest.mark.parametrize("placement", [linear(4), v(4)], ids=["linear", "v"])
def test_a_spread_vocabulary_is_the_same_work_in_equal_shares(placement: Placement) -> None:
    """But for the loss, which is made in float32, and a moment to begin each pass."""
    given, device = shape(vocabulary=256 * K), replace(DEVICE, latency=0.0)
    layers = balanced_layers(32, placement, {})
    whole = estimate(given, placement, layers, device)
    output = whole.stages[-1].total - whole.stages[1].total
    loss = sum(map(device.moving, traffic.loss_traffic(given, given.vocabulary)))
    assert output == pytest.approx(device.seconds(gpt.output_work(given).total) + loss)
    for vocabulary in Vocabulary:
        spread = estimate(given, placement, layers, device, vocabulary)
        assert len(set(spread.stages)) == 1
        share = spread.vocabulary
        spread_loss = sum(map(device.moving, traffic.loss_traffic(given, given.vocabulary, sharded=True)))
        seconds = share.S + share.T
        assert seconds == pytest.approx((output - loss + spread_loss) / 4)
        slower = 1.0 if vocabulary is Vocabulary.INTERLACED else DEVICE.beside_communication
        assert spread.stages[1].total == pytest.approx(slower * whole.stages[1].total)
        assert share.S > share.T if vocabulary is Vocabulary.ONE_BARRIER else share.S < share.T
        assert 4 * share.activation < whole.stages[-1].activation - whole.stages[1].activation


def test_parameters_of_tied_and_spread_vocabularies() -> None:
    """FixedMemory those of the layers, which all ranks have equally many of."""
    given, layer, matrix = shape(vocabulary=1024), 12 * 3072**2, 1024 * 3072

    def others(placement: Placement, vocabulary: Vocabulary | None, tied: bool) -> list[float]:
        found = parameters(given, placement, balanced_layers(32, placement, {}), vocabulary, tied)
        return [one.total - 32 / placement.ranks * layer for one in found]

    assert others(linear(4), None, tied=True) == others(linear(4), None, tied=False) == [matrix, 0, 0, matrix]
    assert others(v(4), None, tied=True) == [matrix, 0, 0, 0]
    assert others(v(4), None, tied=False) == [2 * matrix, 0, 0, 0]
    for placement in (linear(4), v(4)):
        assert others(placement, Vocabulary.ONE_BARRIER, tied=True) == [matrix / 4] * 4
        assert others(placement, Vocabulary.ONE_BARRIER, tied=False) == [matrix / 2] * 4


def test_passes_take_products_and_traffic_and_a_moment_to_begin() -> None:
    given, layers = shape(), [8, 8, 8, 8]
    work, moved = gpt.layer_work(given), traffic.layer_traffic(given)
    stage = estimate(given, linear(4), layers, DEVICE).stages[1]
    for seconds, operations, size in zip((stage.forward, stage.backward, stage.weight), work, (*moved, 0.0), strict=True):
        assert seconds == pytest.approx(8 * (DEVICE.seconds(operations) + DEVICE.moving(size)) + DEVICE.latency)
    assert stage.fused == pytest.approx(stage.backward + stage.weight - DEVICE.latency)  # which begins once
    waiting = estimate(given, linear(4), layers, DEVICE, exposed_hops=0.5)
    for name in ("forward", "backward", "fused"):
        assert getattr(waiting.stages[1], name) == pytest.approx(getattr(stage, name) + waiting.hop / 2)
    assert waiting.stages[1].weight == stage.weight


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_fused_backward_hides_sums_over_tensor_parallel_ranks(sequence_parallel: bool) -> None:
    """Those of the two linear layers that are cut by columns, each for as long as its weights' gradients take."""
    given = replace(shape(), policy=ActivationPolicy(tensor=4, sequence_parallel=sequence_parallel))

    def saved(device: Device, of: Shape = given) -> float:
        stage = estimate(of, linear(4), [8] * 4, device).stages[1]
        return (stage.backward + stage.weight - stage.value("fused") - device.latency) / 8

    each = DEVICE.within.all_reduce(2 * 2048 * 3072, 4) / (2 if sequence_parallel else 1)
    assert saved(replace(DEVICE, beside_communication=1.0)) == pytest.approx(2 * each)
    assert saved(DEVICE) == pytest.approx(2 * each / 1.06), "what computes meanwhile takes longer"
    slow = DEVICE.with_links(1e9)
    assert saved(slow) == pytest.approx(slow.seconds(2 * 2048 * 3072 * (3 * 3072 + 4 * 3072) / 4))
    assert saved(DEVICE, replace(given, policy=ActivationPolicy())) == pytest.approx(0.0)


def test_passes_of_a_gpu_that_was_measured_take_as_many_times_as_long() -> None:
    """What ranks wait for comes on top."""
    given = replace(shape(), policy=ActivationPolicy(tensor=2, sequence_parallel=True))
    by_formulas, links = computing_seconds(given, DEVICE), Links.within(DEVICE)
    device = replace(DEVICE, forward=2.0, backward=3.0, weight=0.5)
    all_reduce = 2 * DEVICE.within.all_reduce(2 * 2048 * 3072, 2)
    expected = (2 * by_formulas.forward + all_reduce, 3 * by_formulas.backward + all_reduce, by_formulas.weight / 2)
    assert layer_seconds(given, device, links) == pytest.approx(expected)


def test_bytes_that_kernels_move() -> None:
    """In bytes for each token and unit of width, of a plain GPT of heads that share nothing in 16 bits."""
    given, unit = shape(), 2048 * 3072

    def moved(**how: object) -> tuple[float, float]:
        return tuple(size / unit for size in traffic.layer_traffic(replace(given, **how)))  # type: ignore[arg-type, return-value]

    # Norms and residuals 10 and 20, the MLP's activation 8 and 12, layouts 4 each, all of two bytes; masks of one byte.
    assert moved() == (2 * (10 + 8 + 4) + 2, 2 * (20 + 12 + 4) + 2)
    assert moved(policy=ActivationPolicy(hidden_masks=False)) == (44, 72)
    assert moved(qkv_bias=True) == (2 * (22 + 6) + 2, 2 * (36 + 3) + 2)
    matrices = 24 * 2048 / 3072  # scores of all heads, in widths
    assert moved(policy=ActivationPolicy(attention_matrices=True)) == (46 + 13 * matrices, 74 + 19 * matrices)
    halves = moved(policy=ActivationPolicy(tensor=2, sequence_parallel=True))
    assert halves == (23, 37)
    assert traffic.loss_traffic(given, 10) == (2048 * 10 * 6, 2048 * 10 * 6)
    assert traffic.loss_traffic(given, 10, sharded=True) == (2048 * 10 * 10, 2048 * 10 * 6)
    assert traffic.embedding_traffic(given) == (2 * 2 * unit, 5 * 2 * unit)
    assert traffic.embedding_traffic(given, 0.25) == (1.25 * 2 * unit, 2 * 2 * unit)


def test_the_output_layer_holds_its_softmax_until_b_and_a_gradient_of_half_the_size_until_w() -> None:
    given = shape()
    stages = estimate(given, linear(4), [8] * 4, DEVICE).stages
    hidden, logits = 2 * 2048 * 3072, 2048 * 32 * K
    assert stages[-1].activation - stages[1].activation == hidden + 4 * logits
    assert stages[-1].retained - stages[1].retained == hidden + 2 * logits


def test_what_recomputation_takes() -> None:
    """All of a layer, or what is named of it; never the output layer."""
    given, placement = shape(), linear(4)

    def again(**how: object) -> list[float]:
        stages = estimate(replace(given, policy=ActivationPolicy(**how)), placement, [8] * 4, DEVICE).stages  # type: ignore[arg-type]
        return [stage.recompute for stage in stages]

    whole = layer_seconds(given, DEVICE, Links.within(DEVICE)).forward
    assert again(recompute_layers=1) == pytest.approx([8 * whole] * 4)
    core, mlp = again(recomputed=frozenset({"core_attn"})), again(recomputed=frozenset({"mlp"}))
    assert core == pytest.approx([8 * DEVICE.seconds(gpt.attention_work(given).forward)] * 4)
    assert mlp == pytest.approx([8 * DEVICE.seconds(16 * given.tokens * given.hidden**2)] * 4)
    assert again(recomputed=frozenset({"core_attn", "mlp"})) == pytest.approx(
        [one + other for one, other in zip(core, mlp, strict=True)]
    )
