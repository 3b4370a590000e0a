"""Turns on a shared device: one rank at a time, ranks of one turn together, and nobody waits for a rank that is dead."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool

from megatron.pipeline.session.rehearsal.device_lock import DeviceLock

Interval = tuple[float, float]


def in_turns(path: Path, count: int, together: bool) -> list[Interval]:
    """When this rank had its turns; with ``together`` ranks of the same half of the world share them."""
    group = None
    if together:
        halves: Any = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
        group = halves[torch.distributed.get_rank() // 2]
    found = []
    with path.open("ab") as file:
        turns = DeviceLock(file, group)
        torch.distributed.barrier()
        for _ in range(count):
            with turns.turn():
                start = time.monotonic()
                time.sleep(0.005)
                if group is not None:  # only ranks that have the turn at once can meet in it
                    torch.distributed.barrier(group)
                found.append((start, time.monotonic()))
    return found


def overlap(one: Interval, other: Interval) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def test_no_two_ranks_have_a_turn_at_once(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "turns").touch()
    had = pool.run(4, in_turns, tmp_path / "turns", 8, False)
    every = sorted(interval for rank in had for interval in rank)
    assert len(every) == 32
    assert not any(overlap(one, other) for one, other in pairwise(every))


def test_ranks_that_share_passes_have_their_turns_together(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "turns").touch()
    had = pool.run(4, in_turns, tmp_path / "turns", 5, True)
    for first in (0, 2):
        assert all(overlap(one, other) for one, other in zip(had[first], had[first + 1], strict=True))
    assert not any(overlap(one, other) for one in had[0] + had[1] for other in had[2] + had[3])


def test_a_rank_that_dies_gives_its_turn_back(tmp_path: Path) -> None:
    path = tmp_path / "turns"
    path.touch()
    ready = multiprocessing.get_context("fork").Event()

    def hold() -> None:
        with path.open("ab") as file, DeviceLock(file).turn():
            ready.set()
            time.sleep(60)

    holder = multiprocessing.get_context("fork").Process(target=hold)
    holder.start()
    assert ready.wait(30)
    os.kill(holder.pid or 0, 9)
    holder.join(30)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def opened_elsewhere(hosts: list[str]) -> str:
    """What a rank says whose machine has this name."""
    with patch("socket.gethostname", lambda: hosts[torch.distributed.get_rank()]):
        try:
            DeviceLock.open()
        except ValueError as error:
            return str(error)
    return "no error"


def test_ranks_of_several_machines_are_refused(pool: Pool) -> None:
    expected = "--rehearse runs all ranks on one machine, and they are on node1, node2: start them on one"
    assert pool.run(2, opened_elsewhere, ["node1", "node2"]) == [expected] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_that_fails_gives_the_turn_back(tmp_path: Path, fails: bool) -> None:
    with (tmp_path / "turns").open("ab") as file, (tmp_path / "turns").open("ab") as other:
        one = DeviceLock(file)
        try:
            with one.turn():
                with pytest.raises(BlockingIOError):
                    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if fails:
                    raise RuntimeError("out of luck")
        except RuntimeError:
            pass
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
