"""Loops that call as slime and as NeMo-RL do: log-probabilities, losses, norms and weights have the bits of the same loop under
megatron-core's own schedule."""

from __future__ import annotations

import pytest
from marked import rest, whole
from pool import Pool
from session import rl_loops
from session.rl_loops import Trained

OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}


def check(stock: list[Trained], ours: list[Trained], exact: bool) -> None:
    """Norms are sums of squares over other ranks, or buckets, where they are not exact."""
    assert [rank.reported for rank in ours] == [rank.reported for rank in stock]
    assert any(map(any, (rank.reported for rank in ours)))
    norms = [rank.norms for rank in stock]
    assert [rank.norms for rank in ours] == (norms if exact else [pytest.approx(row, rel=1e-6) for row in norms])
    assert min(map(min, norms)) > 1e-4


@pytest.mark.parametrize(
    ("schedule", "per_token"),
    [
        rest("zb-v", False),
        whole("zb-h1", True),
        whole("zb-h1", False),
        whole("zb-v", True),
    ],
)
def test_slime(pool: Pool, schedule: str, per_token: bool) -> None:
    stock, ours = pool.each(4, rl_loops.as_slime, ("stock", schedule), 4, per_token)
    check(stock, ours, schedule == "zb-h1")
    if schedule == "zb-h1":
        assert [rank.weights for rank in ours] == [rank.weights for rank in stock]


@pytest.mark.parametrize("schedule", [whole("zb-h1"), "zb-v"])
def test_slime_with_replicas(pool: Pool, schedule: str) -> None:
    stock, ours = pool.each(4, rl_loops.as_slime, ("stock", schedule), 2, True, **OVERLAP)
    check(stock, ours, False)


@pytest.mark.parametrize("in_parts", [whole(False), True])
@pytest.mark.parametrize("schedule", [whole("zb-h1"), "zb-auto"])
def test_nemo_rl(pool: Pool, schedule: str, in_parts: bool) -> None:
    stock, ours = pool.each(4, rl_loops.as_nemo_rl, ("stock", schedule), 4, in_parts)
    check(stock, ours, True)
    assert [rank.weights for rank in ours] == [rank.weights for rank in stock]


@pytest.mark.rest
@pytest.mark.parametrize("in_parts", [False, True])
def test_nemo_rl_with_replicas(pool: Pool, in_parts: bool) -> None:
    stock, ours = pool.each(4, rl_loops.as_nemo_rl, ("stock", "zb-h1"), 2, in_parts, **OVERLAP)
    check(stock, ours, False)
