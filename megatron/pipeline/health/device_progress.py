"""Position of a GPU in a program whose host may be far ahead of it.

The host posts receives and launches passes without waiting, so in a hang all hosts stand in the next read of the device, and
their own position says nothing of who waits for whom. An event behind every pass and every wait says where the device is.
"""

from __future__ import annotations

import threading
from collections import deque

import torch

from megatron.pipeline.schedule.lower.posting import LEAD


class DeviceProgress:
    """The operations of one iteration whose end the device has yet to reach. ``current`` may be asked from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque()
        self._passes: deque[torch.cuda.Event] = deque(maxlen=LEAD)  # the ends of the last ones

    def catch_up(self) -> None:
        """Have the host wait until the device has no more than ``LEAD - 1`` passes to end; called before each pass.

        That cannot be a deadlock: no program would be one even if its rank waited for the end of each operation.
        """
        if len(self._passes) == LEAD:
            self._passes[0].synchronize()

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
