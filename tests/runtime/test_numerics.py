"""Loss and gradient norm of every iteration equal megatron-core's own 1F1B bit for bit, whatever the schedule and layout.

One run of each schedule has 20 iterations; the others are shorter: what a schedule does wrong in one it does in the first.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
from pool import Pool

OURS = ("1f1b", "zb-h1", "zb-h2")


def assert_equals_stock(pool: Pool, ranks: int, schedules: tuple[str, ...], **options: Any) -> None:
    stock = pool.run(ranks, tiny_gpt.train, "stock", **options)
    losses = [loss for loss, _ in stock[-1]]
    assert None not in losses and len(set(losses)) == len(losses), "the last rank has a loss, and it changes"
    for schedule in schedules:
        assert pool.run(ranks, tiny_gpt.train, schedule, **options) == stock, schedule


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_pipeline_sizes(pool: Pool, pp: int, microbatches: int) -> None:
    iterations = 20 if (pp, microbatches) == (4, 4) else 4
    assert_equals_stock(pool, pp, OURS, pp=pp, microbatches=microbatches, iterations=iterations)


@pytest.mark.parametrize(
    ("pp", "tp", "flags"),
    [
        (2, 2, ""),
        (2, 2, "--sequence-parallel"),
        (2, 1, ""),
        (2, 1, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        (2, 1, "--overlap-grad-reduce --ddp-bucket-size 1"),
        (2, 1, "--calculate-per-token-loss"),
        (2, 2, "--sequence-parallel --bf16 --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm"),
        (4, 1, "--bf16 --accumulate-allreduce-grads-in-fp32"),
        (4, 1, "--fp16 --initial-loss-scale 4096"),
        (4, 1, "--untie-embeddings-and-output-weights --swiglu --disable-bias-linear --position-embedding-type rope"),
        (4, 1, "--hidden-dropout 0.1 --attention-dropout 0.1"),
        (4, 1, "--hidden-dropout 0.1 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ],
)
def test_layouts_and_settings(pool: Pool, pp: int, tp: int, flags: str) -> None:
    """With fused and with split backwards; others only order these differently."""
    schedules = ("1f1b", "zb-h2")
    assert_equals_stock(pool, 4, schedules, pp=pp, tp=tp, microbatches=6, flags=tuple(flags.split()), iterations=4)


def test_pipeline_size_changes_no_gradient(pool: Pool) -> None:
    """Seeds go by layer, iteration and microbatch: without clipping, the losses do not depend on the pipeline size."""
    flags = ("--clip-grad", "0", "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--untie-embeddings-and-output-weights")
    whole = pool.run(1, tiny_gpt.train, "1f1b", pp=1, flags=flags, iterations=6)
    cut = pool.run(4, tiny_gpt.train, "zb-h1", pp=4, flags=flags, iterations=6)
    assert [loss for loss, _ in cut[-1]] == [loss for loss, _ in whole[-1]]
    for (_, norm), (_, expected) in zip(cut[-1], whole[-1], strict=True):
        assert norm == pytest.approx(expected, rel=1e-6)


def test_dropout_differs_between_microbatches(pool: Pool) -> None:
    with_dropout = ("--hidden-dropout", "0.3")
    assert pool.run(1, tiny_gpt.train, "1f1b", iterations=2) != pool.run(
        1, tiny_gpt.train, "1f1b", iterations=2, flags=with_dropout
    )


def evaluate_in_between(schedule: str) -> list[tiny_gpt.Step]:
    run = tiny_gpt.Run(schedule, pp=2, flags=("--overlap-grad-reduce",))
    steps = []
    for iteration in range(3):
        steps.append(run.step(iteration))
        for chunk in run.chunks:
            chunk.eval()
        steps.append(run.step(100 + iteration, forward_only=True))
        for chunk in run.chunks:
            chunk.train()
    return steps


def test_evaluation(pool: Pool) -> None:
    stock = pool.run(4, evaluate_in_between, "stock")
    for schedule in OURS:
        assert pool.run(4, evaluate_in_between, schedule) == stock
