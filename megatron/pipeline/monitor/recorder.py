"""The record of one iteration on one rank: when each pass ran, each wait, and how many activation bytes were held."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.pipeline.distributed.device import side_stream, this_device
from megatron.pipeline.monitor.clock import Clock
from megatron.pipeline.monitor.memory import ActivationMeter
from megatron.pipeline.planner import Kind, Pass, Timed, ops


class Waited(NamedTuple):
    """A wait for a message to come, at the end of an iteration to have gone, for a collective or for a copy, with its times."""

    message: ops.Message | ops.Collective | Pass
    start: float
    end: float


@dataclass(frozen=True)
class Record:
    """Record of one rank and one iteration. Times are in seconds since the epoch.

    Attributes:
        passes: in the order they ran.
        waits: in their order, between the passes.
        held: activation bytes at the end of every pass.
        peak_activation_bytes: the most at any moment.
        copies: to host memory and back, as they were on the way; in ``passes`` they take no time, and stand for the moments at
            which their memory was freed or allocated.
    """

    passes: tuple[Timed, ...]
    waits: tuple[Waited, ...]
    held: tuple[int, ...]
    peak_activation_bytes: int
    copies: tuple[Timed, ...] = ()


class NullRecorder:
    """Measures nothing; ``Recorder`` does."""

    def measure(self, _: Pass) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self, _: ops.Message | ops.Collective | Pass) -> AbstractContextManager[None]:
        return nullcontext()

    def reach(self, _: Pass) -> None:
        """Nothing to take note of."""

    def observing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def end(self, _: Iterable[tuple[Pass, Any, Any]] = ()) -> None:
        """Nothing to end."""


class Recorder(NullRecorder):
    """Measures one iteration of this rank.

    On a GPU passes and waits are timed by events, without waiting for them, and are ranges for NVIDIA's profilers (NVTX).
    Memory is the allocator's, above what was allocated when the iteration began: its statistics of the peak start anew with
    every iteration. On a CPU the clock times, and memory is counted by an ``ActivationMeter``.

    Args:
        parameters: the model's, which are not activations.
        count: on a GPU, too, what is held at the end of passes is counted by an ``ActivationMeter``: the allocator's numbers
            include messages. That takes the host some microseconds for each tensor that autograd saves.
        clock: times passes and waits on a CPU, in seconds.
        host: seconds that this thread has computed. If given, what it has computed since the pass before (messages posted, losses
            summed) belongs to a pass on a CPU, which starts that much earlier. On a GPU the host does it while passes run.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], count: bool = False, clock: Clock = time.time, host: Clock | None = None
    ) -> None:
        self._clock, self._host = clock, host
        self._host_before: float | None = None  # at the end of the last pass
        self._passes: list[tuple[Pass, Any, Any, int]] = []
        self._waits: list[tuple[ops.Message | ops.Collective | Pass, Any, Any]] = []
        self._copies: list[tuple[Pass, Any, Any]] = []
        self._on_gpu = torch.cuda.is_available()
        self._meter = ActivationMeter(parameters) if count or not self._on_gpu else None
        self._peak = 0
        self._epoch: float | None = None  # the moment of the first event, once it is known
        if self._on_gpu:
            self._first = self._last = self._mark()
            self._allocated = _allocated()
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def measure(self, work: Pass) -> Iterator[None]:
        """Time a pass; if it is a forward, count what it saves."""
        with torch.cuda.nvtx.range(str(work)) if self._on_gpu else nullcontext():
            start = self._mark()
            if self._host and not self._on_gpu:
                now = self._host()
                start -= now - (now if self._host_before is None else self._host_before)
            if self._meter and work.kind in (Kind.F, Kind.R):
                with self._meter.saving():
                    yield
            else:
                yield
            self._passes.append((work, start, self._mark(), self._held()))
            if self._host:
                self._host_before = self._host()

    @contextmanager
    def wait(self, message: ops.Message | ops.Collective | Pass) -> Iterator[None]:
        """Time a wait for a message, a collective or a copy."""
        start = self._mark()
        yield
        self._waits.append((message, start, self._mark()))

    def reach(self, copy: Pass) -> None:
        """Record the place of a copy among the passes, and the bytes held there."""
        now = self._mark()
        self._passes.append((copy, now, now, self._held()))

    def observing(self) -> AbstractContextManager[None]:
        """A context in which tensors that outlive their pass are counted (see ``memory.hold``)."""
        return self._meter.observing() if self._meter else nullcontext()

    def end(self, copies: Iterable[tuple[Pass, Any, Any]] = ()) -> None:
        """The passes are over; what is allocated from here on, such as the optimizer's state, is no activation.

        Args:
            copies: with the marks of their start and end.
        """
        self._copies = list(copies)
        if self._on_gpu:
            self._peak = torch.cuda.max_memory_allocated() - self._allocated
        else:
            assert self._meter is not None
            self._peak = self._meter.peak

    def record(self) -> Record:
        """Measurements of the iteration. On a GPU this waits for the passes to end, but not for what was started after them."""
        if self._on_gpu:
            self._last.synchronize()
            if self._epoch is None:
                now = _reached_now()  # before the host's clock is read
                self._epoch = time.time() - self._first.elapsed_time(now) / 1000
        return Record(
            tuple(Timed(work, self._seconds(start), self._seconds(end)) for work, start, end, _ in self._passes),
            tuple(Waited(message, self._seconds(start), self._seconds(end)) for message, start, end in self._waits),
            tuple(held for *_, held in self._passes),
            self._peak,
            tuple(Timed(copy, self._seconds(start), self._seconds(end)) for copy, start, end in self._copies),
        )

    def _held(self) -> int:
        return self._meter.current if self._meter else _allocated() - self._allocated

    def _mark(self) -> Any:
        if not self._on_gpu:
            return self._clock()
        self._last = torch.cuda.Event(enable_timing=True)
        self._last.record()
        return self._last

    def _seconds(self, mark: Any) -> float:
        if self._epoch is None:
            return mark
        return self._epoch + self._first.elapsed_time(mark) / 1000


def _reached_now() -> torch.cuda.Event:
    """An event of this moment, on an idle stream: it relates the clock of events to the host's."""
    event = torch.cuda.Event(enable_timing=True)
    with side_stream(this_device(), "clock"):
        event.record()
    event.synchronize()
    return event


def _allocated() -> int:
    """Bytes that the allocator has given out, without the list of all its statistics in order that ``memory_allocated`` makes."""
    bytes_: int = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"]
    return bytes_
