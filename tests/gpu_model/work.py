"""One operation of a process group on its way: what the host may ask of it, and when its data are there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpu_model.cuda import device
from gpu_model.memory import _place
from gpu_model.order import HOST, Clock

STUCK = 8.0  # seconds after which a synchronize that waits for a message counts as a deadlock
LOST = 40.0  # and any wait for data, which ranks that compute elsewhere may keep waiting


class Over:
    """Whether some requests of gloo are, and all before them in their line."""

    def __init__(self, requests: Sequence[Any]) -> None:
        self._requests = [request for request in requests if request is not None]
        self._event = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        """Wait for the requests; in the line's thread."""
        try:
            for request in self._requests:
                request.wait()
        except Exception as error:
            self._error = error
        self._requests.clear()
        self._event.set()

    def asked(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Raises: what gloo did, such as a timeout."""
        over = self._event.wait(seconds)
        if self._error is not None:
            raise self._error
        return over


class Line:
    """The operations of one communicator: each is over once it and all that were posted before it are, as on its stream.

    A thread waits for them: gloo does not say of a message whether it is over, unless somebody waits for it.
    """

    def __init__(self) -> None:
        self._posted: SimpleQueue[Over | None] = SimpleQueue()
        threading.Thread(target=self._run, name="communicator", daemon=True).start()

    def put(self, requests: Sequence[Any]) -> Over:
        over = Over(requests)
        self._posted.put(over)
        return over

    def close(self) -> None:
        self._posted.put(None)

    def _run(self) -> None:
        while (over := self._posted.get()) is not None:
            over.run()
            del over


class Work:
    """What a process group returns.

    Args:
        kept: tensors that stay alive until the first wait.
        done: an event behind it.
        moment: of the trace, in which it was posted.
        move: puts what arrived where it belongs.
        over: whether its data have moved.
    """

    def __init__(self, kept: list[Any], done: Clock, moment: int, move: Callable[[], None], over: Over) -> None:
        self._kept, self._move = kept, move
        self.done, self.moment, self.over = done, moment, over
        self._moved = self._asked = False
        self.posted = _place()

    def wait(self, timeout: Any = None) -> bool:
        self.land()
        one = device()
        one.memory.sweep()
        one.order.wait(one.current.name, self.done)
        one.trace.follow(one.current.name, self.moment)
        self._kept.clear()
        one.memory.sweep()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Never at the first time: the device takes some."""
        over, self._asked = self._asked and self.over.asked(), True
        device().trace.ask(self.moment, over, _place())
        if over:
            self.land()
            device().order.wait(HOST, self.done)
        return over

    is_success = is_completed

    def land(self) -> None:
        """Have the data where they belong, as they are for whoever waits by a stream."""
        if not self._moved:
            self._moved = True
            device().arriving[:] = [one for one in device().arriving if one[1] != self.land]
            if not self.over.wait(LOST):
                raise RuntimeError(f"DEADLOCK: what was posted at {self.posted} does not come to its end")
            with _disable_current_modes(), torch.no_grad():
                self._move()
            del self._move  # and with it the tensors
            if self.land_before in device().waits:
                device().waits.remove(self.land_before)

    def land_before(self) -> None:
        """For ``torch.cuda.synchronize``, which waits for all that was posted."""
        if not self.over.wait(STUCK):
            raise RuntimeError(
                f"DEADLOCK: torch.cuda.synchronize() ({_place()}) waits for a message posted at {self.posted}, whose sender "
                "waits for what comes after the synchronize"
            )
        self.land()
