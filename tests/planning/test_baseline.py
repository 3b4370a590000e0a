"""Costs cut into another number of stages, and stock at its best at them."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.planner.planning.choose import stock_at_its_best
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts, VocabularyCosts, uniform
from megatron.pipeline.planner.schedule.core.cutting import with_whole_vocabulary
from megatron.pipeline.planner.schedule.core.placement import interleaved, linear

STAGES = st.lists(
    st.builds(lambda f, b, w, held, share: StageCosts(f, b, w, held, held * share), *[st.floats(0.1, 10)] * 4, st.floats(0, 1)),
    min_size=1,
    max_size=8,
)


def total(costs: Costs, name: str) -> float:
    return sum(getattr(stage, name) for stage in costs.stages)


@examples(200)
@given(STAGES, st.integers(1, 12))
def test_another_number_of_stages_is_the_same_model(stages: list[StageCosts], depth: int) -> None:
    costs = Costs(tuple(stages), hop=0.5)
    cut = cutting.of_depth(costs, depth)
    assert (len(cut.stages), cut.hop) == (depth, 0.5)
    for name in ("forward", "backward", "weight", "activation"):
        assert total(cut, name) == pytest.approx(total(costs, name))
    if len(stages) % depth == 0 or depth % len(stages) == 0:
        back = cutting.of_depth(cut, len(stages))
        if depth > len(stages):
            for one, other in zip(back.stages, costs.stages, strict=True):
                assert one.forward == pytest.approx(other.forward)


def test_stages_are_joined_in_their_order() -> None:
    stages = tuple(StageCosts(number, 2.0, 1.0, 4.0, 2.0, fused=5.0 if number == 1 else None) for number in (1.0, 2.0, 3.0, 4.0))
    joined = cutting.of_depth(Costs(stages), 2)
    assert [stage.forward for stage in joined.stages] == [3.0, 7.0]
    assert [stage.value("fused") for stage in joined.stages] == [8.0, 6.0]
    assert joined.stages[1].fused is None
    assert [stage.retained for stage in joined.stages] == [4.0, 4.0]


def test_what_the_ends_cost_more_stays_at_the_ends() -> None:
    plain, last = StageCosts(4, 4, 4, 8, 4), StageCosts(10, 10, 8, 20, 16)
    cut = cutting.of_depth(Costs((plain, plain, plain, last)), 8)
    assert cut.stages[:7] == (plain.share(2),) * 7
    assert cut.stages[7] == StageCosts(8, 8, 6, 16, 14)


def test_interleaving_is_stock_at_its_best_where_messages_are_short() -> None:
    costs = uniform(linear(4), hop=0.01)
    best = stock_at_its_best(costs, 4, 8)
    assert str(best.variant) == "interleaved v=4"
    # Analytic: (p - 1) / (v m) of the passes, and every chunk's messages.
    assert best.timeline.bubble_rate == pytest.approx(3 / (4 * 8 + 3), abs=0.03)
    assert best.value == pytest.approx(min(stock_at_its_best(costs, 4, 8, layers).value for layers in (4, 8, 16, 24)))


@pytest.mark.parametrize(
    ("microbatches", "layers", "hop", "name"),
    [
        (6, None, 0.0, "1f1b"),  # megatron-core interleaves multiples of the ranks alone
        (8, 4, 0.0, "1f1b"),
        (8, 8, 0.0, "interleaved v=2"),
        (8, 24, 0.0, "interleaved v=3"),
        (8, None, 3.0, "1f1b"),
    ],
)
def test_chunks_that_stock_cannot_have_are_not_tried(microbatches: int, layers: int | None, hop: float, name: str) -> None:
    assert str(stock_at_its_best(uniform(linear(4), hop=hop), 4, microbatches, layers).variant) == name


def test_one_rank_has_nothing_to_interleave() -> None:
    assert str(stock_at_its_best(uniform(linear(1)), 1, 4).variant) == "1f1b"


def test_a_spread_vocabulary_goes_back_to_the_ends() -> None:
    costs = uniform(interleaved(4, 2), vocabulary=VocabularyCosts(S=1, T=2, IF=0.25, IB=0.5, activation=3))
    whole = with_whole_vocabulary(costs, 4)
    assert whole.vocabulary == VocabularyCosts()
    assert [stage.total - plain.total for stage, plain in zip(whole.stages, costs.stages, strict=True)] == [3, *[0] * 6, 12]
    assert whole.stages[-1].activation == costs.stages[-1].activation + 12
    assert stock_at_its_best(costs, 4, 8).value > stock_at_its_best(uniform(interleaved(4, 2)), 4, 8).value
