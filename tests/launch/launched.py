"""Launches scripts for tests: every rank is a process that was forked with torch and pip's megatron-core imported."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pool import forked, free_port

from megatron.pipeline.distributed import processes

STAND_IN = Path(__file__).parent / "stand_in" / "pretrain_gpt.py"
OWN = Path(__file__).parents[2] / "pretrain_gpt.py"
SIZES = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 "
    "--global-batch-size 16 --lr 1e-2 --vocab-size 61 --attention-dropout 0 --hidden-dropout 0 "
)

Steps = list[tuple[float, float]]


def written_board(folder: Path) -> Any:
    """What TensorBoard reads there."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    return EventAccumulator(str(folder)).Reload()


def launch(
    directory: Path,
    script: Path,
    flags: str,
    ranks: int = 2,
    before: str = "",
    target: Callable[..., None] | None = None,
    patience: float = 400,
) -> Steps:
    """Losses and gradient norms of a run that must end well; it has 2 pipeline ranks, or as many as the flags say."""
    codes, output, metrics = run(directory, script, flags, ranks, before, target=target, patience=patience)
    assert codes == [0] * ranks, output
    return metrics


def run(
    directory: Path,
    script: Path,
    flags: str,
    ranks: int,
    before: str = "",
    started: int | None = None,
    target: Callable[..., None] | None = None,
    patience: float = 400,
) -> tuple[list[int | None], str, Steps]:
    """Exit codes of the ranks that are started, by default all; what they printed; and losses and gradient norms.

    Args:
        target: what each runs; by default ``rank``, or ``own``.
        patience: seconds after which a rank is ended.
    """
    directory.mkdir(parents=True, exist_ok=True)
    port, output, metrics = free_port(), directory / "output", directory / "metrics.jsonl"
    arguments = ["--pipeline-model-parallel-size", "2", *flags.split(), "--metrics", str(metrics)]
    function = target or (own if script == OWN else rank)
    if script != OWN:
        arguments = [*before.split(), str(script), *arguments]
    processes = [forked(function, number, ranks, port, output, arguments) for number in range(started or ranks)]
    for process in processes:
        process.join(timeout=patience)
        process.kill()
        process.join()
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [(step["loss"], step["grad_norm"]) for step in map(json.loads, lines)]
    return [process.exitcode for process in processes], output.read_text(), steps


def rank(number: int, ranks: int, port: int, output: Path, arguments: list[str]) -> None:
    """``mpipe launch ARGUMENTS`` as this rank; what it prints goes to the end of a file, and its exit code is the process's."""
    _become(number, ranks, port, output)
    from megatron.pipeline.cli import main

    sys.exit(main(["launch", *arguments]))


def own(number: int, ranks: int, port: int, output: Path, arguments: list[str]) -> None:
    """``pretrain_gpt.py ARGUMENTS`` of this repository, in the same way."""
    _become(number, ranks, port, output)
    from megatron.pipeline import patches

    patches.install()
    from megatron.pipeline.trainer.program import main

    sys.exit(main(arguments))


def _become(number: int, ranks: int, port: int, output: Path) -> None:
    processes._FIRST_WORD = 0  # no launcher would end this rank while it waits
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost")
    os.environ.update(MASTER_PORT=str(port), CUDA_DEVICE_MAX_CONNECTIONS="1")
    with output.open("a") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
