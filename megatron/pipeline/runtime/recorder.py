"""What one iteration did on this rank: when each pass ran, and how many activation bytes were held at most."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from megatron.pipeline.runtime.memory import ActivationMeter
from megatron.pipeline.schedule.passes import Kind, Pass
from megatron.pipeline.schedule.timeline import Timed


class Unmeasured:
    """Stands where a ``Recorder`` could, and measures nothing."""

    def measure(self, _: Pass) -> AbstractContextManager[None]:
        return nullcontext()

    def hold(self, _: Iterable[torch.Tensor]) -> list[Any]:
        return []

    def end(self) -> None:
        """Nothing to end."""


class Recorder:
    """Measures the passes of one iteration.

    On a GPU passes are timed by events, without waiting for them, and memory is the allocator's own peak above what was
    allocated when the iteration began: its statistics of the peak start anew with every iteration. On a CPU passes are
    timed by the clock and memory is counted by an ``ActivationMeter``.

    Args:
        parameters: the model's, which are not activations.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._marks: list[tuple[Pass, Any, Any]] = []
        self._on_gpu = torch.cuda.is_available()
        self._meter = None if self._on_gpu else ActivationMeter(parameters)
        self._epoch = time.time()
        self.peak_activation_bytes = 0
        if self._on_gpu:
            self._first = self._mark()
            self._allocated = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def measure(self, work: Pass) -> Iterator[None]:
        """Time a pass; if it is a forward, count what it saves."""
        start = self._mark()
        if self._meter and work.kind is Kind.F:
            with self._meter.saving():
                yield
        else:
            yield
        self._marks.append((work, start, self._mark()))

    def hold(self, tensors: Iterable[torch.Tensor]) -> list[Any]:
        """Count tensors that outlive their pass, until the returned objects die."""
        return [self._meter.hold(tensor) for tensor in tensors] if self._meter else []

    def end(self) -> None:
        """The passes are over; what is allocated from here on, such as the optimizer's state, is no activation."""
        self.peak_activation_bytes = self._meter.peak if self._meter else torch.cuda.max_memory_allocated() - self._allocated

    def timed(self) -> tuple[Timed, ...]:
        """The passes in the order they ran, in seconds since the epoch. On a GPU this waits for them to end."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return tuple(Timed(work, self._seconds(start), self._seconds(end)) for work, start, end in self._marks)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        return self._epoch + self._first.elapsed_time(mark) / 1000 if self._on_gpu else mark
