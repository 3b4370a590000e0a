"""Weights that are gathered behind each bucket's step are those of one step and gather, in a loop that does more than train."""

from __future__ import annotations

import pytest
import torch
from marked import rest
from pool import Pool
from runtime import gathers


@pytest.mark.parametrize(
    ("schedule", "trains", "bucket", "clip", "instances", "ranks"),
    [
        ("zb-v", "", 4096, 0.05, 2, 4),
        rest("zb-v", "", 4096, 0.05, 2, 8),  # each of two replicas
        rest("zb-v", "", 1, 0.0, 1, 4),  # a bucket for each weight, and shards of nothing
        rest("zb-v", "linear_qkv", 4096, 0.05, 1, 4),
        rest("zb-v", "first", 4096, 0.05, 1, 4),
        rest("zb-v", "ranks", 4096, 0.05, 1, 4),
        rest("zb-h1", "final_layernorm", 4096, 0.05, 1, 4),  # one rank alone has a weight to train
    ],
)
def test_an_own_loop(pool: Pool, schedule: str, trains: str, bucket: int, clip: float, instances: int, ranks: int) -> None:
    """PP 2; with one instance of the distributed optimizer and with two, which add gradients up on a stream of their own."""
    options = trains, bucket, clip, instances
    behind, at_once = (pool.run(ranks, gathers.train, schedule, overlap, *options, timeout=200) for overlap in (True, False))
    for (seen, weights, _), (expected, stepped, none) in zip(behind, at_once, strict=True):
        assert seen == expected and not none
        assert all(torch.equal(*pair) for pair in zip(weights, stepped, strict=True))
    assert any(early for *_, early in behind)
