"""The split of layers that makes a schedule short: a descent from the even split, and its string for Megatron-LM."""

from __future__ import annotations

from argparse import Namespace
from itertools import product

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
from megatron.pipeline.planner.schedule.core.placement import interleaved
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.shape.stages import balanced_layers

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
    """Where ranks wait for messages, a longer first rank can be worth it: the descent finds what ``balanced_layers`` cannot."""
    costs = costs_with({"F": 0.15, "B": 0.35}, comm=0.3)
    found = of("1f1b", 4, 4, 18, costs)
    placement = families.placement("1f1b", 4)
    model = Model.of(costs(placement), 18)
    lightest = balanced_layers(18, placement, model.extra(placement))
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
