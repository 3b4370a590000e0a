"""Processes that end with their parent, messages of one rank only, and free ports; without torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing.connection import wait

_FIRST_WORD = 10  # seconds


def end_with_parent(*ignored: int) -> None:
    """End this process when its parent has ended or was killed: an initializer for a pool of processes.

    Args:
        ignored: signals by which it does not end: a terminal sends SIGINT, and torchrun SIGTERM, to all processes of a program.
    """
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_and_end, args=(parent.sentinel,), daemon=True).start()


def _wait_and_end(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def let_rank_0_speak() -> None:
    """On other ranks, wait until rank 0 has printed the same error and what started them has ended all ranks.

    On nodes without rank 0 those of torchrun wait for one another in the same way: the first prints it.
    """
    if int(os.environ.get("RANK", "0")) > 0:
        time.sleep(_FIRST_WORD + int(os.environ.get("LOCAL_RANK", "0")))


def free_port() -> int:
    """A port of this machine that nothing uses now. Another process may take it later."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
