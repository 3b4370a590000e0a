"""Work of the ranks of ``test_processes.py``, which fails in every way."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from megatron.pipeline.tune.processes import Tell


def act(job: dict[int, str], tell: Tell) -> None:
    """Does what the job says of this rank."""
    tell("work")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    how = job.get(rank, "")
    if how == "dies":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hangs":
        time.sleep(600)
    elif how.startswith("/"):
        Path(how).write_text(f"rank {rank} of {ranks}")
    elif how:
        raise RuntimeError(f"{how}\nand more")
