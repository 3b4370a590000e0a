"""A loop that builds HybridModel and knows nothing of a schedule; ``tests/launch/test_front_door.py`` has Megatron-LM's own."""

from __future__ import annotations

import pytest
from example_runs import Steps, example, optimizer_of
from megatron.core.transformer import TransformerConfig
from pool import Pool
from releases import CORE

pytestmark = pytest.mark.skipif(CORE < (0, 18), reason="this megatron-core has no HybridModel")


def train(schedule: str, pattern: str) -> Steps:
    """Two iterations of the example's loop, with letters for layers."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    own = example("own_training_loop")
    own.plan(schedule)
    own.GPTModel, own.get_gpt_layer_local_spec = HybridModel, lambda: example("local_letters").STACK
    chunks = own.wrap(own.build(hybrid_layer_pattern=pattern, position_embedding_type="learned_absolute"))
    optimizer = optimizer_of(chunks)
    steps = [own.run(chunks, own.batches(4, seed=seed), optimizer) for seed in range(2)]
    return [([losses.tolist() for losses in reports], float(norm)) for reports, norm in steps]


def test_letters_train_as_under_stock(pool: Pool) -> None:
    """On a V stages end at ``|``, or without any evenly."""
    stock = pool.run(2, train, "stock", "*-*-|*-*-")[-1]
    assert [len(losses) for losses, _ in stock] == [4, 4]
    assert pool.run(2, train, "zb-h1", "*-*-|*-*-")[-1] == stock
    for pattern in ("*-*|-|*-*|-", "*-*-*-*-"):
        ours = pool.run(2, train, "v-half", pattern)[-1]
        assert [losses for losses, _ in ours] == [losses for losses, _ in stock]


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
