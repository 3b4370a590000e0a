"""Ranks that ``mpipe check`` starts, and how they fail."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
from tune import started_ranks

from megatron.pipeline.tune import processes


def run(job: dict[int, str], silence: float = 60.0) -> None:
    processes.run(started_ranks.act, job, 2, silence)


def test_all_ranks_have_done_their_work(tmp_path: Path) -> None:
    files = {rank: tmp_path / f"{rank}.txt" for rank in range(2)}
    run({rank: str(file) for rank, file in files.items()})
    assert [file.read_text() for file in files.values()] == ["rank 0 of 2", "rank 1 of 2"]


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({0: "Connection closed by peer", 1: "dies"}, r"rank 1 of 2 died \(signal 9\), at: work"),
        ({1: "out of luck"}, r"rank 1 of 2 failed \(RuntimeError: out of luck\), at: work"),
    ],
)
def test_a_rank_that_dies_or_fails_is_named(job: dict[int, str], expected: str) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(processes.RankFailed, match=f"^{expected}$"):
        run(job)
    assert set(multiprocessing.active_children()) <= before, "all ranks have been ended"


def test_a_rank_that_hangs_is_named() -> None:
    start, before = time.monotonic(), set(multiprocessing.active_children())
    with pytest.raises(processes.RankFailed, match=r"^rank 0 of 2 has said nothing for 3 s, at: (work|start-up)$"):
        run({0: "hangs"}, silence=3.0)
    assert time.monotonic() - start < 60, "it was not waited for"
    assert set(multiprocessing.active_children()) <= before
