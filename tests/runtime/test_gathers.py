"""Weights that are gathered behind each bucket's step are those of one step and gather, in a loop that does more than train."""

from __future__ import annotations

import pytest
import torch
from marked import rest
from pool import Pool
from runtime import gathers


@pytest.mark.parametrize(
    ("schedule", "trains", "bucket", "clip"),
    [
        rest("zb-v", "", 4096, 0.05),
        ("zb-v", "", 1, 0.0),  # a bucket for each weight, and shards of nothing
        rest("zb-v", "linear_qkv", 4096, 0.05),
        rest("zb-v", "first", 4096, 0.05),
        rest("zb-v", "ranks", 4096, 0.05),
        ("zb-h1", "final_layernorm", 4096, 0.05),  # one rank alone has a weight to train
    ],
)
def test_an_own_loop(pool: Pool, schedule: str, trains: str, bucket: int, clip: float) -> None:
    """PP 2 and DP 2."""
    options = trains, bucket, clip
    behind, at_once = (pool.run(4, gathers.train, schedule, overlap, *options, timeout=200) for overlap in (True, False))
    for (seen, weights, _), (expected, stepped, none) in zip(behind, at_once, strict=True):
        assert seen == expected and not none
        assert all(torch.equal(*pair) for pair in zip(weights, stepped, strict=True))
    assert any(early for *_, early in behind)
