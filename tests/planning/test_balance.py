"""The split of layers that makes a schedule short: a descent from the even split, and its string for Megatron-LM."""

from __future__ import annotations

from argparse import Namespace
from itertools import combinations_with_replacement, pairwise, product

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType

from megatron.pipeline.model.layout import stage_layers
from megatron.pipeline.planner.planning.balance import Model, layout
from megatron.pipeline.planner.planning.costs import CostFlags, costs_of
from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.planning.request import CostsOf, Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved, linear, v
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.shape.hybrid import Pattern
from megatron.pipeline.planner.shape.stages import balanced_by_weight, balanced_layers, heaviest

OUTPUT = {"F": 0.4, "B": 0.8, "activation": 0.1}


def costs_with(last: dict[str, float], **cost: float) -> CostsOf:
    flags = CostFlags(cost={"F": 1, "B": 1.2, "W": 0.8} | cost, last_stage=last)
    return lambda placement: costs_of(flags, placement)


def of(name: str, ranks: int, microbatches: int, layers: int, costs: CostsOf, limit: float | None = None) -> Planned:
    return Request(name, ranks, microbatches, costs, memory_limit=limit, layers=layers, objective="makespan").plan()


@pytest.mark.parametrize(("name", "ranks", "layers"), [("1f1b", 3, 9), ("1f1b", 4, 10), ("zb-h1", 3, 10), ("zb-v", 2, 5)])
def test_no_split_of_a_small_model_is_shorter(name: str, ranks: int, layers: int) -> None:
    costs = costs_with(OUTPUT, comm=0.05)
    found = of(name, ranks, 6, layers, costs)
    placement = families.placement(name, ranks)
    model = Model.of(costs(interleaved(ranks, 2)), layers)
    inner = placement.last_stage
    splits = ((*counts, layers - sum(counts)) for counts in product(range(1, layers), repeat=inner) if sum(counts) <= layers)
    best = min(Request(name, ranks, 6, model.cut(split), objective="makespan").plan().value for split in splits)
    assert found.value == pytest.approx(best)
    assert found.split and found.split.even and found.value < found.split.even


def test_the_lightest_ranks_are_not_always_the_shortest() -> None:
    """Where ranks wait for messages, a longer first rank can be worth it: a descent finds what ``balanced_by_weight`` cannot."""
    costs = costs_with({"F": 0.15, "B": 0.35}, comm=0.3)
    found = of("1f1b", 4, 4, 18, costs)
    placement = families.placement("1f1b", 4)
    model = Model.of(costs(placement), 18)
    lightest = balanced_by_weight([layer.total for layer in model.layers], placement, model.extra(placement))
    alone = Request("1f1b", 4, 4, model.cut(lightest), objective="makespan").plan()
    assert found.split and list(found.split.layers) != lightest
    assert found.value < alone.value * 0.999


@examples(24)
@given(
    st.sampled_from(["1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "zb-auto"]),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(8, 14),
    st.floats(0, 0.8),
    st.floats(0, 0.2),
)
def test_it_is_never_longer_than_the_even_split(name: str, ranks: int, rounds: int, layers: int, more: float, hop: float) -> None:
    found = of(name, ranks, rounds * ranks, layers, costs_with({"F": more, "B": more}, comm=hop))
    split = found.split
    assert split and sum(split.layers) == layers and min(split.layers[1:-1], default=1) >= 1
    assert split.even is None or found.value <= split.even * (1 + 1e-9)
    verify(found.schedule, found.problem.costs, found.problem.limits)


@pytest.mark.parametrize("depth", [3, 4, 8])
@pytest.mark.parametrize("layers", [8, 24])
def test_layers_make_up_the_stages_that_they_were_cut_from(depth: int, layers: int) -> None:
    plain = StageCosts(1.0, 1.2, 0.8, 2.0, 1.0, 1.9, 1.0, 0.1)
    first, last = StageCosts(1.3, 1.4, 0.8, 2.1, 1.0, 2.1, 1.3, 0.1), StageCosts(1.5, 2.2, 1.1, 2.5, 1.2, 3.2, 1.5, 0.1)
    costs = Costs((first, *[plain] * (depth - 2), last), hop=0.1)
    if layers % depth:
        layers = 2 * depth
    again = Model.of(costs, layers).cut([layers // depth] * depth)
    assert again.hop == 0.1
    for mine, its in zip(again.stages, costs.stages, strict=True):
        assert vars(mine) == pytest.approx(vars(its))


def test_a_limit_of_memory_holds_and_counts() -> None:
    costs = costs_with({"F": 1.0, "B": 1.0}, comm=0.05)
    free = of("zb-auto", 3, 9, 12, costs)
    tight = of("zb-auto", 3, 9, 12, costs, limit=2.0)
    assert tight.peak <= 2.0 * (1 + 1e-9) < free.peak
    assert tight.value >= free.value
    with pytest.raises(LimitTooLow):
        of("zb-auto", 3, 9, 12, costs, limit=0.2)


def test_an_even_split_that_does_not_fit_is_said() -> None:
    heavy = costs_with({"F": 0.1, "B": 0.1, "activation": 0.5})
    found = of("1f1b", 4, 8, 16, heavy, limit=3.6)
    assert found.split and found.split.even is None
    assert found.peak <= 3.6


@pytest.mark.parametrize("counts", [(7, 8, 8, 1), (0, 3, 1, 0), (1, 1, 1, 1, 1, 1, 1, 1)])
def test_megatron_reads_the_layout(counts: tuple[int, ...]) -> None:
    args = Namespace(
        pipeline_model_parallel_layout=layout(counts),
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        num_layers=sum(counts),
        mtp_num_layers=None,
    )
    rows = stage_layers(args, interleaved(len(counts) // 2, 2))
    assert tuple(row.count(LayerType.decoder) for row in rows) == counts
    assert rows[0][0] is LayerType.embedding and rows[-1][-1] is LayerType.loss


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("zb-v", 7, r"--balance 7: 8 stages \(4 ranks with 2 chunks each\) need at least 8 layers"),
        ("1f1b", 1, "need at least 3 layers"),
        ("1f1b", 3, "need at least 4 layers"),
        ("1f1b", 10_001, "give at most 10000 layers"),
        ("1f1b", 10**30, "give at most 10000 layers"),
    ],
)
def test_what_cannot_be_split(name: str, layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(name, 4, 8, layers=layers).plan()


def test_early_stages_give_layers_in_turn_until_the_split_fits() -> None:
    """There are more stages than splits that one look tries."""
    heavy = costs_with({"F": 0.1, "B": 0.1, "activation": 0.5})
    found = of("1f1b", 14, 28, 56, heavy, limit=12.4)
    assert found.peak <= 12.4 * (1 + 1e-9)


WEIGHTS = st.sampled_from([0.3, 0.6, 1.0, 1.4, 2.5])
PLACEMENTS = [linear(2), linear(4), v(2), interleaved(2, 2), interleaved(2, 3), v(3)]


@examples(150)
@given(st.sampled_from(PLACEMENTS), st.lists(WEIGHTS, min_size=6, max_size=8), st.sampled_from([0.0, 0.5, 3.0]))
def test_unequal_layers_are_shared_out_as_well_as_they_can_be(placement: Placement, weights: list[float], last: float) -> None:
    extra = {placement.last_stage: last}
    found = balanced_by_weight(weights, placement, extra)
    cuts = combinations_with_replacement(range(len(weights) + 1), placement.last_stage)
    splits = ([end - start for start, end in pairwise((0, *ends, len(weights)))] for ends in cuts)
    best = min(heaviest(split, placement, extra, weights) for split in splits if min(split[1:-1], default=1) >= 1)
    assert sum(found) == len(weights) and min(found[1:-1], default=1) >= 1
    assert heaviest(found, placement, extra, weights) == pytest.approx(best)


@examples(40)
@given(
    st.sampled_from([linear(16), v(8), interleaved(4, 3), v(4)]), st.lists(WEIGHTS, min_size=40, max_size=118), st.floats(0, 9)
)
def test_no_balance_is_heavier_than_even_numbers(placement: Placement, weights: list[float], last: float) -> None:
    extra = {placement.last_stage: last}
    found, even = balanced_by_weight(weights, placement, extra), balanced_layers(len(weights), placement, {})
    assert sum(found) == len(weights) and min(found[1:-1]) >= 1
    assert heaviest(found, placement, extra, weights) <= heaviest(even, placement, extra, weights) * (1 + 1e-9)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda placement: str(placement.stages))
def test_equal_layers_are_shared_out_as_before(placement: Placement) -> None:
    extra = {placement.last_stage: 1.7}
    found = balanced_by_weight([2.0] * 13, placement, {stage: 2 * more for stage, more in extra.items()})
    assert found == balanced_layers(13, placement, extra)


SECONDS = {"M": 1.0, "-": 1.6, "*": 0.5, "E": 3.0}


def by_letter(text: str, last: float = 1.0) -> Model:
    """Layers that take what their letters do, and an output layer."""
    pattern, end = Pattern.of(text), StageCosts(last / 3, last / 3, last / 3, 0.1)
    each = [StageCosts(SECONDS[letter] / 3, SECONDS[letter] / 3, SECONDS[letter] / 3, 1.0) for letter in pattern.letters]
    return Model.by_layer(Costs((StageCosts(0.0, 0.0, 0.0, 0.0), *each, end), hop=0.01, pattern=pattern.whole), pattern)


@examples(25)
@given(st.sampled_from(["1f1b", "zb-h1", "zb-v"]), st.text("M-*E", min_size=8, max_size=14), st.sampled_from(["", "/M*/M*"]))
def test_a_pattern_is_split_by_what_its_letters_take(name: str, letters: str, further: str) -> None:
    depth = families.placement(name, 3).depth
    counts = [1] * (depth - 1) + [len(letters) - depth + 1]
    model = by_letter(Pattern.of(letters + further).cut(counts))
    split = Request(name, 3, 6, layers=model, objective="makespan").plan().split
    assert split and split.even and split.written
    again = Pattern.of(split.layout)
    assert (again.counts, again.letters, again.predictors) == (split.layers, letters, tuple(further.split("/")[1:]))
    value = Request(name, 3, 6, model.cut(split.layers), objective="makespan").plan().value
    assert value <= min(split.even, split.written) * (1 + 1e-9)
    assert split.flag == "--hybrid-layer-pattern"


def test_letters_that_differ_gain_over_even_numbers() -> None:
    split = Request("1f1b", 4, 16, layers=by_letter("EEEE" + "*M" * 6)).plan().split
    assert split and split.layers[0] < 4 < split.layers[-1]


def test_a_written_stage_without_a_letter_is_planned() -> None:
    split = Request("zb-v", 3, 6, layers=by_letter("EE||*MM|M*|-|-"), objective="makespan").plan().split
    assert split and split.written


def test_a_pattern_of_other_stages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"EM\|\*M has 2 stages, and the schedule has 3: leave \| out, or write it 2 times"):
        Request("1f1b", 3, 6, layers=by_letter("EM|*M")).plan()
    with pytest.raises(ValueError, match=r"EM has 2 layers, and the costs are of 3 stages: give 4, .* mpipe costs --by-layer"):
        Model.by_layer(Costs((StageCosts(1.0, 1.0, 1.0),) * 3), Pattern.of("EM"))
    with pytest.raises(ValueError, match="EM: costs are of no letters: give those of this pattern"):
        Model.by_layer(Costs((StageCosts(1.0, 1.0, 1.0),) * 4), Pattern.of("EM"))
