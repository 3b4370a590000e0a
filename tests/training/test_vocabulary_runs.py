"""Trainings with a spread vocabulary, from the flags on: ranks that had no data read it, and losses are those of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pool
from training.short_runs import metrics, train

SMALL = "--pipeline-model-parallel-size 4 --num-layers 8 --attention-dropout 0 --hidden-dropout 0 --eod-mask-loss "


def losses(pool: Pool, flags: str, file: Path) -> list[float]:
    assert pool.run(4, train, f"{SMALL} {flags} --metrics {file}") == [""] * 4
    return [loss for _, loss, _ in metrics(file)]


def test_losses_are_those_of_the_whole_vocabulary(pool: Pool, data: str, tmp_path: Path) -> None:
    """With an evaluation in between; and what only the spread one can do changes the loss."""
    runs = {
        "whole": "--pipeline-schedule 1f1b",
        "spread": "--pipeline-schedule zb-v --vocab-parallel 2 --eval-iters 1 --eval-interval 3 --vocab-logits-limit 0.01MiB",
        "masked": "--pipeline-schedule 1f1b --vocab-parallel 1 --vocab-mask-padding --z-loss 1e-4",
    }
    found = {name: losses(pool, f"{data} {flags}", tmp_path / name) for name, flags in runs.items()}
    assert found["spread"] == pytest.approx(found["whole"], rel=1e-5)
    assert found["masked"][0] < found["whole"][0] - 0.1, "127 rows of padding do not count"
