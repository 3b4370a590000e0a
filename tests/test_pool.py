"""The pool of ranks itself: results in order, and failures that say which rank was where."""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
import torch
from pool import Pool, RankFailed, rank_beside_others, rank_with_gpu


def rank_and_sum() -> tuple[int, float]:
    value = torch.tensor(float(torch.distributed.get_rank() + 1))
    torch.distributed.all_reduce(value)
    return torch.distributed.get_rank(), value.item()


def fail_on(rank: int, how: str) -> None:
    if torch.distributed.get_rank() == rank:
        if how == "raise":
            raise ValueError("deliberate")
        if how == "die":
            os._exit(3)
        forever()


def forever() -> None:
    time.sleep(1000)


@pytest.mark.parametrize("start", [rank_with_gpu, rank_beside_others])
def test_a_rank_with_a_gpu_is_no_fork(start: Any, tmp_path: Path) -> None:
    """A fork of a process that has asked CUDA for its GPUs, as imports of megatron-core do, cannot use one."""
    ours, theirs = multiprocessing.Pipe()
    process = start(theirs, str(tmp_path / "stacks"))
    ours.close()
    process.kill()
    process.join()
    assert isinstance(process, SpawnProcess)


def test_results_are_in_rank_order_for_any_world(pool: Pool) -> None:
    assert pool.run(2, rank_and_sum) == [(0, 3.0), (1, 3.0)]
    assert pool.run(3, rank_and_sum) == [(0, 6.0), (1, 6.0), (2, 6.0)]
    assert pool.run(1, rank_and_sum) == [(0, 1.0)]


@pytest.mark.parametrize(
    ("how", "message"), [("raise", "ValueError: deliberate"), ("die", "the process died"), ("hang", "in forever")]
)
def test_failures_name_the_rank_and_the_place(how: str, message: str) -> None:
    own = Pool()
    try:
        own.run(2, rank_and_sum)  # ranks that are up: on a busy machine starting takes longer than the time below
        with pytest.raises(RankFailed) as error:
            own.run(2, fail_on, 1, how, timeout=3)
        assert "rank 1 of 2" in str(error.value)
        assert message in str(error.value)
        assert own.run(1, rank_and_sum) == [(0, 1.0)], "the pool starts anew"
    finally:
        own.close()


def threads() -> int:
    """gloo's, of this process: one for each group."""
    count = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            count += "gloo" in (thread / "comm").read_text()
    return count


def groups_in_a_circle() -> None:
    """What a wrapped model does: objects that refer to each other, and to process groups."""
    circle: dict[str, object] = {"group": torch.distributed.new_group([0])}
    circle["self"] = circle


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_groups_of_a_world_end_with_it(pool: Pool) -> None:
    """gloo's threads wake up a hundred times a second: those of worlds that have ended would slow down all later ones."""
    pool.run(2, tiny_gpt.train, "zb-h1", pp=2, iterations=1)  # from here on all is imported
    before = pool.run(2, threads)
    pool.run(1, groups_in_a_circle)
    for flags in (
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--num-experts 2 --disable-bias-linear",
    ):
        pool.run(2, tiny_gpt.train, "zb-h1", pp=2, iterations=1, flags=tuple(flags.split()))
    after = pool.run(2, threads)
    assert all(now <= then + 2 for now, then in zip(after, before, strict=True)), "one leaked world has a dozen"
