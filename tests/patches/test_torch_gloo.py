"""Groups of gloo have one thread each: two of a group write to one string without a lock, and break the heap."""

from __future__ import annotations

import os

import torch
from pool import Pool


def _threads_of_groups(groups: int) -> int:
    before = len(os.listdir("/proc/self/task"))
    made = [torch.distributed.new_group([0, 1], backend="gloo") for _ in range(groups)]
    for group in made:
        torch.distributed.barrier(group)
    return len(os.listdir("/proc/self/task")) - before


def test_a_group_has_one_thread(pool: Pool) -> None:
    assert pool.run(2, _threads_of_groups, 5) == [5, 5]
