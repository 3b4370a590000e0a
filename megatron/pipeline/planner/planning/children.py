"""Processes that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import wait


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
