"""Position of a GPU in a program whose host may be far ahead of it.

The host posts receives and launches passes without waiting, so in a hang all hosts stand in the next read of the device, and
their own position says nothing of who waits for whom. An event behind every pass and every wait says where the device is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import torch


class DeviceProgress:
    """The operations of one iteration whose end the device has yet to reach. ``current`` may be asked from another thread.

    Args:
        leads: for each pass in turn, how many before it the device may have left to end when it is launched.
    """

    def __init__(self, leads: Iterable[int]) -> None:
        self._leads = iter(leads)
        self._lock = threading.Lock()
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque()
        self._passes: deque[torch.cuda.Event] = deque()  # the ends of the last ones

    def catch_up(self) -> None:
        """Have the host wait until the device has no more passes to end than the lead of the next; called before each pass.

        That cannot be a deadlock: no program would be one even if its rank waited for the end of each operation.
        """
        for _ in range(len(self._passes) - next(self._leads)):
            self._passes.popleft().synchronize()

    def launched(self, number: int, is_pass: bool = False) -> None:
        """The host has launched an operation; the current stream reaches its end later.

        Args:
            number: grows from operation to operation.
            is_pass: whether it computes, and does not wait.
        """
        event = torch.cuda.Event()
        event.record()
        if is_pass:
            self._passes.append(event)
        with self._lock:
            self._launched.append((number, event))
        self.current()

    def current(self) -> int | None:
        """The first operation that the device has not ended; None if it has ended all that were launched."""
        with self._lock:
            while self._launched and self._launched[0][1].query():
                self._launched.popleft()
            return self._launched[0][0] if self._launched else None
