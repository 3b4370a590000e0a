"""Moments of a computation: on a GPU events in its stream, without waiting for it; else the time of day."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch


class MeasureClock:
    """Marks moments, and says afterwards how long it was between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """This moment: when the GPU has finished all work that was queued before."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until all that was marked has happened. Intervals can be asked for from here on."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two marks."""
        return float(start.elapsed_time(end) / 1000 if self._device.type == "cuda" else end - start)


def repeated(
    clock: MeasureClock,
    parts: Callable[[], Sequence[Any]],
    iterations: int,
    warm_up: int,
    which: Callable[[Sequence[float]], float] = median,
) -> list[float]:
    """Median seconds of every part of something that is done several times.

    The host does not wait in between, as it does not in a training: what it takes to start kernels is seen only where the GPU
    waits for it.

    Args:
        parts: does it once, and returns the marks before, between and after the parts.
        which: of a part's seconds is the one to return; by default the median.
    """
    for _ in range(warm_up):
        parts()
    clock.settle()
    marks = [parts() for _ in range(iterations)]
    clock.settle()
    times = [[clock.between(*pair) for pair in pairwise(row)] for row in marks]
    return [which(part) for part in zip(*times, strict=True)]


def seconds(
    clock: MeasureClock,
    action: Callable[[], object],
    iterations: int,
    warm_up: int,
    which: Callable[[Sequence[float]], float] = median,
    chain: int = 1,
) -> float:
    """Seconds of an action, as a share of those of ``chain`` in a row; the other arguments as in ``repeated``."""

    def parts() -> list[Any]:
        start = clock.mark()
        for _ in range(chain):
            action()
        return [start, clock.mark()]

    return repeated(clock, parts, iterations, warm_up, which)[0] / chain
