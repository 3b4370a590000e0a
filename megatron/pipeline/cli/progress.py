"""A bar on the terminal that says how far a long command is; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

_SILENT = 10.0  # seconds without a line


class Progress:
    """A context that is called with how much is done, and how much there is to do."""

    def __init__(self, what: str) -> None:
        self._bar, self._what, self._told = None, what, time.monotonic()
        if not sys.stderr.isatty():
            return
        # Imported here: rich takes longer to import than most commands run.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Bar(*columns, console=Console(file=sys.stderr), transient=True)
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, known: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=done, total=known)
        elif time.monotonic() - self._told > _SILENT:
            self._told = time.monotonic()
            print(f"{self._what}: {done} of {known}", file=sys.stderr, flush=True)
