"""Pipeline sizes, dropout and evaluations change no number; schedules and layouts: test_schedules_and_layouts.py."""

from __future__ import annotations

import pytest
import tiny_gpt
from pool import Pool

OURS = ("1f1b", "zb-h1")  # of backwards that are split, and that are not


def test_pipeline_size_changes_no_gradient(pool: Pool) -> None:
    """Seeds go by layer, iteration and microbatch: without clipping, the losses do not depend on the pipeline size."""
    flags = ("--clip-grad", "0", "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--untie-embeddings-and-output-weights")
    whole = pool.run(1, tiny_gpt.train, "1f1b", pp=1, flags=flags, iterations=3)
    cut = pool.run(4, tiny_gpt.train, "zb-h1", pp=4, flags=flags, iterations=3)
    assert [loss for loss, _ in cut[-1]] == [loss for loss, _ in whole[-1]]
    for (_, norm), (_, expected) in zip(cut[-1], whole[-1], strict=True):
        assert norm == pytest.approx(expected, rel=1e-6)


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
