"""What a GPT has to compute and to hold, and how layers are shared out between ranks that have other work as well."""

from __future__ import annotations

import itertools

import pytest

from megatron.pipeline.schedule.passes import Vocabulary
from megatron.pipeline.schedule.placement import Placement, interleaved, linear, v
from megatron.pipeline.tune import activations, gpt, offload
from megatron.pipeline.tune.balance import balanced_layers, heaviest
from megatron.pipeline.tune.estimate import Device, estimate
from megatron.pipeline.tune.gpt import Shape
from megatron.pipeline.tune.parameters import parameter_bytes

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
    assert gpt.training_operations(given) == pytest.approx(narayanan)
    assert gpt.output_in_layers(given) == pytest.approx(rows / (12 * h + 2 * seq))
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
            extra = {7: gpt.output_in_layers(shape(seq, thousands * K), recompute)}
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
    given, device = shape(vocabulary=256 * K), Device()
    layers = balanced_layers(32, placement, {})
    whole = estimate(given, placement, layers, device)
    assert whole.stages[-1].total - whole.stages[1].total == pytest.approx(device.seconds(gpt.output_work(given).total))
    for vocabulary in Vocabulary:
        spread = estimate(given, placement, layers, device, vocabulary)
        assert len(set(spread.stages)) == 1
        share = spread.vocabulary
        seconds = share.S + share.T
        assert seconds == pytest.approx(device.seconds(gpt.output_work(given).total) / 4)
        assert share.S > share.T if vocabulary is Vocabulary.ONE_BARRIER else share.S < share.T
        assert 4 * share.activation < whole.stages[-1].activation - whole.stages[1].activation


def test_parameters_of_tied_and_spread_vocabularies() -> None:
    """Beside those of the layers, which all ranks have equally many of."""
    given, layer, matrix = shape(vocabulary=1024), 12 * 3072**2, 1024 * 3072

    def parameters(placement: Placement, vocabulary: Vocabulary | None, tied: bool) -> list[float]:
        layers = balanced_layers(32, placement, {})
        found = parameter_bytes(given, placement, layers, vocabulary, tied, state_bytes=1)
        return [one - 32 / placement.ranks * layer for one in found]

    assert parameters(linear(4), None, tied=True) == parameters(linear(4), None, tied=False) == [matrix, 0, 0, matrix]
    assert parameters(v(4), None, tied=True) == [matrix, 0, 0, 0]
    assert parameters(v(4), None, tied=False) == [2 * matrix, 0, 0, 0]
    for placement in (linear(4), v(4)):
        assert parameters(placement, Vocabulary.ONE_BARRIER, tied=True) == [matrix / 4] * 4
        assert parameters(placement, Vocabulary.ONE_BARRIER, tied=False) == [matrix / 2] * 4


PUBLISHED_K = """
1.70 1.46 1.15 0.80
1.40 1.23 1.00 0.72
1.19 1.07 0.88 0.66
1.03 0.94 0.80 0.61
0.92 0.84 0.72 0.56
0.74 0.69 0.61 0.49
"""  # for an A100: hidden sizes 4096 to 10240 by sequence lengths 4096 to 32768 (arXiv 2503.01328, figure 1)


def test_the_published_k() -> None:
    """All 24 cells to the last digit; an H100 computes twice as fast and copies 1.4 times as fast."""
    found = offload.grid(offload.MACHINES["A100"])
    assert [[f"{k:.2f}" for k in row] for row in found] == [line.split() for line in PUBLISHED_K.strip().splitlines()]
    for mine, its in zip(offload.grid(offload.MACHINES["H100"]), found, strict=True):
        assert mine == pytest.approx([2 * 15 / 21 * k for k in its])


def test_k_of_a_plain_gpt() -> None:
    """Formula 1, which is of heads that share nothing; without making anything again it is 34/20 of that."""
    given, machine = shape(), offload.Machine(Device(peak=100e12, efficiency=1), to_host=10e9, to_device=20e9)
    lean = offload.lean_activation(given)
    assert lean == 20 * given.seq * given.hidden
    formula = 10 / (3 * (6 * given.hidden + given.seq)) * 100e12 * (1 / 10e9 + 1 / 20e9) / 2
    assert offload.k_of(given, machine, lean) == pytest.approx(formula)
    assert offload.k_of(given, machine) == pytest.approx(formula * 34 / 20)
    assert offload.copy_seconds(given, machine, 3.0, lean) == pytest.approx((2 * formula, formula))


def test_a_machine_without_a_way_to_host_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="to_device of a machine must be a number of bytes per second above 0, got 0"):
        offload.Machine(Device(), 1e9, 0)
