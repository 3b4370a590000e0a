"""Progress of a long command: a line on the terminal that changes; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Self

_SILENT = 10.0  # seconds without a line


class Progress:
    """A context that is called with how much is done, and how much there is to do."""

    def __init__(self, what: str) -> None:
        self._what, self._told, self._live = what, time.monotonic(), sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # the line is gone

    def __call__(self, done: int, known: int) -> None:
        if self._live:
            print(f"\r\x1b[K{self._what}: {done} of {known}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._told > _SILENT:
            self._told = time.monotonic()
            print(f"{self._what}: {done} of {known}", file=sys.stderr, flush=True)
