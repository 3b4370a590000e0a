"""Transformer Engine's own linears, of every release that scripts/check_transformer_engine.py has fetched, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from engine import gpt
from engine.linears import HIDDEN, INNER, METERED, OFFLOADED, ORDERS, PLAIN, RECOMPUTED, TOKENS, counted_bytes, gradients
from engine.releases import fetched, ranks_with
from pool import Pool

_SKIP = pytest.mark.skip(
    reason="build/ has no release of Transformer Engine: python scripts/check_transformer_engine.py fetches some"
)
_RELEASES: Sequence[Any] = fetched() or [pytest.param("", marks=_SKIP, id="none")]


@pytest.fixture(scope="module", params=_RELEASES)
def engine(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Ranks with a release of Transformer Engine."""
    ranks = ranks_with(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("saving", [PLAIN, METERED, OFFLOADED, RECOMPUTED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_equals_a_backward_that_delays_nothing(engine: Pool, bias: bool, dtype: torch.dtype, saving: str) -> None:
    expected = engine.run(2, gradients, None, bias, dtype)
    assert all(any(values) for values in expected[0])
    for order in ORDERS:
        assert engine.run(2, gradients, order, bias, dtype, saving) == expected, order


def test_counts_what_the_stores_keep_from_b_to_w(engine: Pool) -> None:
    """Of each linear its input and the gradient of its output, in bfloat16, and nothing of a weight's size."""
    [(forward, between, after)] = engine.run(1, counted_bytes)
    inputs, outputs = HIDDEN + INNER + HIDDEN + HIDDEN, INNER + HIDDEN + HIDDEN + HIDDEN
    assert forward > 0 and after == 0
    assert between == 2 * TOKENS * (inputs + outputs)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, "--bf16"),
        (2, "--swiglu --normalization RMSNorm --disable-bias-linear --recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 1"),
        (4, "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    ],
    ids=["bf16", "recomputed", "distributed optimizer"],
)  # fmt: skip
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_a_gpt_trains_as_under_megatron_cores_schedule(engine: Pool, schedule: str, ranks: int, flags: str) -> None:
    expected = engine.run(ranks, gpt.train, "stock", flags)
    assert engine.run(ranks, gpt.train, schedule, flags) == expected
