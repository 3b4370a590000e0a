"""A weight that the model uses elsewhere than in its module's forward: its gradient is not lost without a word."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
import torch
from megatron.core.utils import unwrap_model
from pool import Pool

USES: dict[str, Any] = {
    "elsewhere": lambda linear, forward, hidden: (hidden @ linear.weight.t(), None),
    "in both": lambda linear, forward, hidden: (forward(hidden)[0] + hidden @ linear.weight.t(), None),
    "nowhere": lambda linear, forward, hidden: (hidden[..., :32], None),
}


def train(schedule: str, use: str, flags: str) -> str:
    """What the rank says whose last layer uses the weight of a linear so: an error, or whether that weight has a gradient."""
    given = ("--disable-bias-linear", "--untie-embeddings-and-output-weights", *flags.split())
    run = tiny_gpt.Run(schedule, pp=2, microbatches=2, flags=given)
    chunk = unwrap_model(run.chunks[-1])
    linear: Any = [module for name, module in chunk.named_modules() if name.endswith("linear_fc2")][-1]
    forward = linear.forward
    if torch.distributed.get_rank() == 1 and use in USES:
        linear.forward = lambda hidden: USES[use](linear, forward, hidden)
    try:
        run.step(0, forward_only=True)
        run.step(1)
    except RuntimeError as error:
        return str(error)
    return "a gradient" if linear.weight.main_grad.any() else "no gradient"


ELSEWHERE = "the model uses its weight elsewhere than in the forward of its module"


@pytest.mark.parametrize(
    ("schedule", "layer", "flags"),
    [("zb-h1", 1, ""), ("1f1b", 1, "--bf16 --overlap-grad-reduce"), ("zb-v", 0, "--bf16 --overlap-grad-reduce")],
)
def test_a_weight_that_is_used_elsewhere_is_named(pool: Pool, schedule: str, layer: int, flags: str) -> None:
    """It would never move, and all else would look right."""
    message = run_on_last(pool, schedule, "elsewhere", flags)
    assert message.startswith(f"W never computed decoder.layers.{layer}.mlp.linear_fc2.weight: {ELSEWHERE}")


def test_a_weight_that_is_used_elsewhere_as_well(pool: Pool) -> None:
    """Its gradient would be a part."""
    message = run_on_last(pool, "zb-h1", "in both", "")
    assert message.startswith(f"W computes a part of a weight of shape (32, 128), and autograd another: {ELSEWHERE}")


def test_other_weights_are_left_alone(pool: Pool) -> None:
    """Those that nothing uses, and those of experts without tokens."""
    assert run_on_last(pool, "zb-h1", "nowhere", "") == "no gradient"
    assert run_on_last(pool, "zb-v", "in its module", "") == "a gradient"
    experts = "--num-experts 16 --moe-router-topk 1 --moe-router-pre-softmax --seq-length 2"  # of 4 tokens a microbatch
    assert run_on_last(pool, "zb-h1", "in its module", experts) in ("a gradient", "no gradient")


def run_on_last(pool: Pool, schedule: str, use: str, flags: str) -> str:
    return str(pool.run(2, train, schedule, use, flags)[1])
