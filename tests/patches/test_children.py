"""What a rank starts: to save, a process that ends with a rank that is killed and does not import torch; for gloo, one thread."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from pool import Pool, forked


def saving(connection: Connection) -> None:
    """What a rank starts in its first save."""
    from megatron.pipeline import patches

    patches.install()
    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    names = [name for name in ("_get_write_results_queue", "get_write_results_queue") if hasattr(filesystem_async, name)]
    queue = getattr(filesystem_async, names[0])()
    for child in multiprocessing.active_children():  # as torchrun does, whose rank saves a checkpoint then
        os.kill(child.pid or 0, signal.SIGTERM)
    time.sleep(0.5)
    queue.put([torch.Size([2, 3])])
    assert queue.get_nowait() == [torch.Size([2, 3])]
    connection.send([child.pid for child in multiprocessing.active_children()])
    time.sleep(60)


def runs(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_what_writes_checkpoints_is_small_and_ends_with_a_rank_that_is_killed() -> None:
    ours, theirs = multiprocessing.Pipe()
    rank = forked(saving, theirs)
    assert ours.poll(60), "the rank says what it has started"
    children = ours.recv()
    assert len(children) == 1 and all(map(runs, children))
    assert "libtorch" not in Path(f"/proc/{children[0]}/maps").read_text()
    assert rank.pid is not None
    os.kill(rank.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(map(runs, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [child for child in children if runs(child)]
    for child in left:
        os.kill(child, signal.SIGKILL)
    assert not left


def threads_of_gloo(groups: int) -> int:
    """That wait for messages, in a rank with as many groups besides the world."""
    import torch

    made = [torch.distributed.new_group([0, 1]) for _ in range(groups)]
    for group in made:
        torch.distributed.all_reduce(torch.ones(1), group=group)
    tasks = Path("/proc/self/task").iterdir()
    return sum((task / "comm").read_text().strip() == "gloo_tcp_loop" for task in tasks)


def test_all_groups_of_gloo_share_a_thread(pool: Pool) -> None:
    assert pool.run(2, threads_of_gloo, 5) == [1, 1]
