"""Copies between a device and host memory that run while passes compute: one stream for each direction."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # sources and targets, alike in shape and type


class Ticket(Protocol):
    """Copies under way."""

    def wait(self) -> None:
        """Passes that follow find the copies done. On a GPU the stream waits, never the host."""

    @property
    def times(self) -> tuple[Any, Any]:
        """Their start and end, as a ``Recorder`` marks moments: events on a GPU, else seconds since the epoch."""


class CopyStreams:
    """Copies of one direction run one after another; the two directions run at the same time."""

    device: torch.device
    _to_host: Any
    _to_device: Any

    def to_host(self, pairs: Pairs) -> Ticket:
        """Start copies from the device, behind what has been launched so far. Sources must live until the ticket's ``wait``."""
        return self._start(self._to_host, pairs)

    def to_device(self, pairs: Pairs) -> Ticket:
        """Start copies to the device. Targets must live until the ticket's ``wait``."""
        return self._start(self._to_device, pairs)

    def close(self) -> None:
        """Accept no more copies; cancel those that have not begun, where that is possible."""

    def _start(self, direction: Any, pairs: Pairs) -> Ticket:
        raise NotImplementedError


def copy_streams_for(device: torch.device, bandwidth: float | None = None) -> CopyStreams:
    """The streams of a device. The bandwidth of each direction, in bytes a second, is what a CPU imitates; a GPU has its own."""
    return CudaCopyStreams(device) if device.type == "cuda" else ThreadCopyStreams(bandwidth, bandwidth)


class CudaCopyStreams(CopyStreams):
    """The copy streams of a GPU.

    No tensor is recorded on these streams (``record_stream``), which would keep its memory until the host asks again. Order
    alone makes it right. A source is freed on the compute stream after the ``wait``, so the next use of its memory follows the
    copy. A target is allocated on the compute stream before the copy, which starts behind an event recorded there: earlier
    uses of that memory have ended. The same holds for host memory: a reload's source is written again by a later copy to the
    host, which starts behind an event that follows the reload's ``wait``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._to_host = torch.cuda.Stream(self.device)
        self._to_device = torch.cuda.Stream(self.device)

    @torch.no_grad()
    def _start(self, stream: torch.cuda.Stream, pairs: Pairs) -> Ticket:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record(stream)
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            end.record(stream)
        return _StreamTicket(self.device, (start, end))


@dataclass
class _StreamTicket:
    device: torch.device
    times: tuple[torch.cuda.Event, torch.cuda.Event]

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.times[1])


class ThreadCopyStreams(CopyStreams):
    """Imitates a GPU's copy streams on a CPU: one thread for each direction, with a given bandwidth.

    Bytes are copied at the end of the time that their copy takes, so that what reads targets or reuses sources too early
    gets other numbers. The threads end with ``close``, with this object or with the process, whichever comes first.

    Args:
        bandwidth_to_host, bandwidth_to_device: bytes a second; None for as fast as the machine copies.
    """

    def __init__(self, bandwidth_to_host: float | None = None, bandwidth_to_device: float | None = None) -> None:
        self.device = torch.device("cpu")
        self._to_host = _Direction("copies to the host", bandwidth_to_host)
        self._to_device = _Direction("copies to the device", bandwidth_to_device)
        # Also when the interpreter exits: a thread inside of torch must not outlive it.
        self._closing = weakref.finalize(self, _close, self._to_host, self._to_device)

    def close(self) -> None:
        """End the threads. Copies that have not begun fail: their ``wait`` raises."""
        self._closing()

    def _start(self, direction: _Direction, pairs: Pairs) -> Ticket:
        return direction.start(pairs)


class _ThreadTicket(Future[tuple[float, float]]):
    def wait(self) -> None:
        """Raises: RuntimeError: the streams were closed before the copies. An error of a copy is raised here as well."""
        self.result()

    @property
    def times(self) -> tuple[float, float]:
        return self.result()


class _Direction:
    """One direction. Its thread refers to this object alone, so that ``ThreadCopyStreams`` can be garbage."""

    def __init__(self, name: str, bandwidth: float | None) -> None:
        self._name = name
        self._bandwidth = bandwidth
        self._fastest = 0.0  # bytes a second that this machine has copied
        self._jobs: SimpleQueue[tuple[list[tuple[torch.Tensor, torch.Tensor]], _ThreadTicket] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, pairs: Pairs) -> Ticket:
        if self._closed.is_set():
            raise RuntimeError(self._reason())
        self._jobs.put((list(pairs), done := _ThreadTicket()))
        return done

    def close(self) -> None:
        self._closed.set()
        self._jobs.put(None)
        if self._thread is not threading.current_thread():  # where garbage collection happens to run
            self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            pairs, done = job
            try:
                times = self._copy(pairs)
            except BaseException as error:
                done.set_exception(error)
            else:
                pairs.clear()  # before ``wait`` returns: nothing is held by then
                done.set_result(times)
            del job, pairs, done  # or they would live while the next one is awaited

    @torch.no_grad()
    def _copy(self, pairs: Pairs) -> tuple[float, float]:
        start = time.time()
        size = sum(source.numel() * source.element_size() for source, _ in pairs)
        takes = size / self._bandwidth if self._bandwidth else 0.0
        copying = size / self._fastest if self._fastest else 0.0
        if self._closed.wait(max(0.0, takes - copying)):
            raise RuntimeError(self._reason())
        began = time.perf_counter()
        for source, target in pairs:
            target.copy_(source)
        self._fastest = max(self._fastest, size / max(time.perf_counter() - began, 1e-9))
        return start, time.time()

    def _reason(self) -> str:
        return f"{self._name}: the streams have been closed"


def _close(*streams: _Direction) -> None:
    for stream in streams:
        stream.close()
