"""A clock that stands still while the machine gives this thread's core to others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

Clock = Callable[[], float]


def undisturbed() -> Clock:
    """The time less what the calling thread has spent ready to run without a core: seconds, for differences alone.

    A sleep counts, and so does a wait for another process; what other processes take away from this thread does not. It is the
    plain time where the kernel does not say (Linux does, in ``/proc/.../schedstat``: proc(5), sched-stats of the kernel's
    documentation).
    """
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # stays open as long as this process lives
        int(os.pread(file, 64, 0).split()[1])
    except (OSError, IndexError):
        return time.time

    def waited() -> int:
        return int(os.pread(file, 64, 0).split()[1])

    def now() -> float:
        before = waited()
        while True:
            moment = time.time()
            if (after := waited()) == before:
                return moment - after / 1e9
            before = after  # the core was taken away between the two readings: they do not belong together

    return now
