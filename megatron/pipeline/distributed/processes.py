"""Messages of one rank only, the end of a process, and free ports; without torch."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from typing import NoReturn

_FIRST_WORD = 10  # seconds


def let_rank_0_speak() -> None:
    """On other ranks, wait until rank 0 has printed the same error and what started them has ended all ranks.

    On nodes without rank 0 those of torchrun wait for one another in the same way: the first prints it.
    """
    if int(os.environ.get("RANK", "0")) > 0:
        time.sleep(_FIRST_WORD + int(os.environ.get("LOCAL_RANK", "0")))


def leave(code: int) -> NoReturn:
    """End this process as ``sys.exit`` does, but for the interpreter's own end.

    A model's hooks hold its process groups until then, and a thread of gloo that lets a tensor go meanwhile asks for an
    interpreter that has ended: the process is aborted ("terminate called without an active exception") after all is done.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def free_port() -> int:
    """A port of this machine that nothing uses now. Another process may take it later."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
