"""Progress of a long command: a line on the terminal with a bar that grows; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Self

_SILENT = 10.0  # seconds without a line
_UNSURE = 2.0  # seconds without a guess of the time left
_BAR = 20  # characters


class Progress:
    """A context that is called with how much is done, how much there is to do, and which share of the time that may be."""

    def __init__(self, what: str) -> None:
        self._what, self._began, self._live = what, time.monotonic(), sys.stderr.isatty()
        self._told = self._began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # the line is gone

    def __call__(self, done: int, known: int, share: float | None = None) -> None:
        now, share = time.monotonic(), share or done / max(known, 1)
        if not done:
            self._began = now  # what there is to do is still being counted
        line, passed = f"{self._what}: {done} of {known}", now - self._began
        if passed > _UNSURE and share:
            left = passed * (1 / share - 1)
            line += f", about {f'{left / 60:.0f} min' if left > 90 else f'{left:.0f} s'} left"
        if self._live:
            bar = "#" * round(_BAR * min(1.0, share))
            print(f"\r\x1b[K[{bar:{_BAR}}] {line}", end="", file=sys.stderr, flush=True)
        elif now - self._told > _SILENT:
            self._told = now
            print(line, file=sys.stderr, flush=True)
