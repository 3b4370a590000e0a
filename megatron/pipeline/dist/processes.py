"""What several kinds of processes have in common, without torch."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.connection import wait

_FIRST_WORD = 10  # seconds


def end_with_parent() -> None:
    """End this process when the one that started it has ended, in whatever way: for the initializer of a pool of processes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_wait_and_end, args=(parent.sentinel,), daemon=True).start()


def _wait_and_end(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def let_rank_0_speak() -> None:
    """On other ranks wait until rank 0 has said what is wrong, if it is wrong there as well: torchrun then ends all of them."""
    if int(os.environ.get("RANK", "0")) > 0:
        time.sleep(_FIRST_WORD)


def free_port() -> int:
    """A port of this machine that nothing uses now; nothing else is expected to take it in the next moments."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
