"""Gradients are reduced within the passes, on every pipeline rank, and weights gathered before the first of them."""

from __future__ import annotations

import pytest
import reductions
import tiny_gpt
from marked import rest
from pool import Pool

BOTH = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4096 --num-layers 8"


def train(schedule: str, flags: str) -> reductions.Buckets:
    """Of the third iteration: megatron-core's DDP learns in the first when a bucket is complete."""
    with reductions.noted() as found:
        tiny_gpt.train(schedule, pp=4, microbatches=8, iterations=3, flags=(*BOTH.split(), *flags.split()))
    return found[2]


@pytest.mark.parametrize(
    "flags",
    [
        "zb-h1 --untie-embeddings-and-output-weights",
        rest("zb-v --untie-embeddings-and-output-weights"),
        rest("interleaved --num-virtual-stages-per-pipeline-rank 2"),
        "zb-v --vocab-parallel 2 --untie-embeddings-and-output-weights",
        "zb-v --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --disable-bias-linear",
    ],
)
def test_on_every_pipeline_rank_buckets_are_reduced_within_the_passes(pool: Pool, flags: str) -> None:
    schedule, _, more = flags.partition(" ")
    for found in pool.run(4, train, schedule, more):
        assert min(found.groups) > 1, found
        assert found.reduced == found.groups
        # All but those of the chunk that ends last, whose weights the last pass computes.
        assert sum(early < groups for early, groups in zip(found.early, found.groups, strict=True)) <= 1, found
        assert found.ahead == sum(found.groups) and found.in_order, found
