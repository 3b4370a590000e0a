"""Trainings as others write them, for tests."""

from __future__ import annotations

from pathlib import Path

from megatron.pipeline.cli.memory import Prediction, predicted

BATCH = "--seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --pipeline-model-parallel-size 4 --pipeline-schedule stock"


def of_file(file: Path, flags: str) -> Prediction:
    return predicted(["--config", str(file), *flags.split()])
