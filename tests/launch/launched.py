"""One rank of a script that test_launch.py launches: a process that was forked with torch and pip's megatron-core imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron.pipeline.dist import processes


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
