"""A loop that builds HybridModel and knows nothing of a schedule; ``tests/launch/test_front_door.py`` has Megatron-LM's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from example_runs import Steps, example, optimizer_of
from megatron.core.transformer import TransformerConfig
from pool import Pool
from releases import CORE

from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.placement import linear

pytestmark = pytest.mark.skipif(CORE < (0, 18), reason="this megatron-core has no HybridModel")


class Trained(NamedTuple):
    """What two iterations left on a rank.

    Attributes:
        letters: numbers of the layers of each chunk.
        planned: of every stage, F's seconds and what it allocates; empty under megatron-core's own schedule.
    """

    steps: Steps
    letters: list[list[int]]
    planned: list[tuple[float, float]]


def train(schedule: str, pattern: str) -> Steps:
    """Two iterations of the example's loop, with letters for layers."""
    return trained(schedule, pattern).steps


def trained(schedule: str, pattern: str, length: int = 16, layout: str | None = None, **options: Any) -> Trained:
    """The same.

    Args:
        length: of the longest sequence for which the model is built, and predicted; those that come have 16 tokens.
        layout: of the configuration.
        options: of ``install``.
    """
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    own = example("own_training_loop")
    pipeline = own.plan(schedule, **options)
    own.GPTModel, own.get_gpt_layer_local_spec = HybridModel, lambda: example("local_letters").STACK
    own.LENGTH, own.TransformerConfig = length, partial(TransformerConfig, pipeline_model_parallel_layout=layout)
    try:
        chunks = own.wrap(own.build(hybrid_layer_pattern=pattern, position_embedding_type="learned_absolute"))
    finally:
        own.LENGTH, own.TransformerConfig = 16, TransformerConfig
    optimizer = optimizer_of(chunks)
    reports = [own.run(chunks, own.batches(4, seed=seed), optimizer) for seed in range(2)]
    steps = [([losses.tolist() for losses in losses_of], float(norm)) for losses_of, norm in reports]
    letters = [[layer.layer_number for layer in chunk.module.decoder.layers] for chunk in chunks]
    costs = () if pipeline.is_stock else pipeline.plans.planned_costs.stages
    return Trained(steps, letters, [(stage.forward, stage.activation) for stage in costs])


def test_letters_train_as_under_stock(pool: Pool) -> None:
    """On a V stages end at ``|``, or without any evenly."""
    stock = pool.run(2, train, "stock", "*-*-|*-*-")[-1]
    assert [len(losses) for losses, _ in stock] == [4, 4]
    assert pool.run(2, train, "zb-h1", "*-*-|*-*-")[-1] == stock
    for pattern in ("*-*|-|*-*|-", "*-*-*-*-"):
        ours = pool.run(2, train, "v-half", pattern)[-1]
        assert [losses for losses, _ in ours] == [losses for losses, _ in stock]


LONG, UNEQUAL = 1 << 16, "*------*"  # attention of as many keys takes far longer than an MLP


def test_letters_without_stages_are_balanced(pool: Pool) -> None:
    """On a line, on a V, whose first rank has both ends, and interleaved, which stock refuses."""
    stock, line, on_a_v, interleaved = pool.each(4, trained, ("stock", "zb-h1", "zb-v", "interleaved"), UNEQUAL, LONG)
    assert [rank.letters for rank in stock] == [[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]]
    assert line[0].letters == [[1]]
    assert sum(len(chunk) for chunk in on_a_v[0].letters) == 1, "even stages would give it both letters of attention"
    for found in (line, on_a_v, interleaved):
        assert sorted(number for rank in found for chunk in rank.letters for number in chunk) == [*range(1, 9)]
        assert [losses for losses, _ in found[-1].steps] == [losses for losses, _ in stock[-1].steps]
        assert [rank.planned for rank in found] == [found[0].planned] * 4
    assert [seconds for seconds, _ in line[0].planned] == [1.0] * 4
    assert line[0].planned[1][1] > line[0].planned[0][1], "memory follows the letters"


@pytest.fixture
def letter_costs(tmp_path: Path) -> str:
    """Costs of the pattern, whose third letter takes as long as all others."""
    one = uniform(linear(10))
    stages = [stage.slowed(scale) for stage, scale in zip(one.stages, (0, 1, 1, 7, 1, 1, 1, 1, 1, 0), strict=True)]
    (file := tmp_path / "costs.json").write_text(replace(one, stages=tuple(stages), pattern=UNEQUAL).to_json(), encoding="utf-8")
    return str(file)


def test_costs_of_letters_balance_where_nothing_else_says_where_stages_end(pool: Pool, letter_costs: str) -> None:
    stock = pool.run(4, trained, "stock", UNEQUAL)[-1]
    found = pool.run(4, trained, "zb-h1", UNEQUAL, costs=letter_costs)
    assert [rank.letters for rank in found] == [[[1, 2]], [[3]], [[4, 5]], [[6, 7, 8]]]
    assert [seconds for seconds, _ in found[0].planned] == [2, 7, 2, 3]
    written = pool.run(4, trained, "zb-h1", "*---|--|-|*", costs=letter_costs)
    assert [rank.letters for rank in written] == [[[1, 2, 3, 4]], [[5, 6]], [[7]], [[8]]]
    assert [seconds for seconds, _ in written[0].planned] == [10, 2, 1, 1]
    given = pool.run(4, trained, "zb-v", UNEQUAL, layout="Et|t|t|t|t|t|t|tL", costs=letter_costs)
    assert [rank.letters for rank in given] == [[[1], [8]], [[2], [7]], [[3], [6]], [[4], [5]]]
    for one in (found, written, given):
        assert [losses for losses, _ in one[-1].steps] == [losses for losses, _ in stock.steps]


def with_costs(pattern: str, costs: str) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # which one the test says
        trained("zb-h1", pattern, costs=costs)
    return str(error.value)


def test_costs_of_another_pattern_are_refused(pool: Pool, letter_costs: str) -> None:
    assert "costs are of *------*: give those of this pattern" in pool.run(2, with_costs, "-*----*-", letter_costs)[0]


def refused(pattern: str) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # which one the test says
        train("zb-v", pattern)
    return str(error.value)


def test_experts_with_biases_are_refused() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=2)
    with pytest.raises(ValueError, match="train without biases: give --disable-bias-linear"):
        example("local_letters").ExpertsLayer(config)


def test_another_number_of_stages_is_refused(pool: Pool) -> None:
    assert "*-*-|*-*- has 2 stages, and the schedule has 4" in pool.run(2, refused, "*-*-|*-*-")[0]
