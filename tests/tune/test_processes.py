"""Ranks that ``mpipe check`` starts, and how they fail."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
from tune import started_ranks

from megatron.pipeline.tune import processes


def run(job: dict[int, str], silence: float = 60.0) -> Any:
    return processes.run(started_ranks.act, job, 2, lambda _: None, silence)


def test_the_first_rank_has_the_result() -> None:
    told: list[str] = []
    assert processes.run(started_ranks.act, {}, 2, told.append, 60.0) == "rank 0 of 2"
    assert told in (["work"], ["start-up", "work"])


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
