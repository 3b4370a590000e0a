"""Messages of one rank only, and free ports; without torch."""

from __future__ import annotations

import os
import socket
import time

_FIRST_WORD = 10  # seconds


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
