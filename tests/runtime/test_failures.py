"""A rank that raises, dies or hangs ends every rank soon, with its name and its pass in the message."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("failing_ranks.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "rank 2 failed in Compute F3.0 of iteration 1: RuntimeError: out of luck"),
        ("die", "rank 2 died: it has been silent for 2 s, and was last in "),
        ("hang", "nothing has moved on rank "),
    ],
)
def test_every_rank_names_the_failed_one(how: str, message: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(SCRIPT), how]
    started = time.monotonic()
    ended = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode != 0
    if how == "hang":
        assert "rank 2 in Compute F3.0 of iteration 1" in ended.stderr
    survivors = [rank for rank in range(4) if how != "die" or rank != 2]
    for rank in survivors:
        assert f"rank {rank} ends because {message}" in ended.stderr, f"after {time.monotonic() - started:.0f} s\n{ended.stderr}"
