"""Watchdogs: of a training by its flags, and of a loop of which its calls alone are known (``install(.., watchdog=seconds)``)."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.monitor.progress import Situation
from megatron.pipeline.monitor.watchdog import Watchdog, stuck_seconds
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.session import save_lock

Guard = Callable[..., AbstractContextManager[object]]


def watching(args: Settings, situation: Callable[[], Situation], guard: Guard = Watchdog) -> AbstractContextManager[object]:
    """A context for a training, in which a rank that fails or hangs ends all, and lets other runs save where it has saved.

    Args:
        situation: says where this rank is.
        guard: makes it, of what a ``Watchdog`` takes.
    """
    release = partial(save_lock.release, args.save)
    stuck = stuck_seconds(args.distributed_timeout_minutes)
    return guard(situation, args.pipeline.timeout, stuck_seconds=stuck, at_end=release)


class CallWatch:
    """Position of this rank, and the watchdog that the others' are read by.

    Args:
        patience: seconds that an iteration may stand still; None for no watchdog.

    Raises:
        ValueError: a watchdog would never bite.
    """

    def __init__(self, patience: float | None) -> None:
        if patience is not None and not 0 < patience < float("inf"):
            raise ValueError(f"install(watchdog={patience!r}): give seconds above 0, or leave it out")
        self._patience = patience
        self._watchdog: Watchdog | None = None
        self._place: Pipeline | str | None = None  # whose iteration runs, or what may take longer than one
        self._moves = 0  # grows where a call begins to wait for other ranks, and ends to

    def start(self) -> None:
        """Start the watchdog, once, if there is to be one; collective over the world.

        Raises:
            ValueError: it cannot know where the processes have met.
        """
        if self._patience is None or self._watchdog is not None:
            return
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ValueError(
                f"install(watchdog={self._patience:g}) exchanges signs of life where the processes have met: set MASTER_ADDR and "
                "MASTER_PORT before torch.distributed.init_process_group, or leave watchdog out"
            )
        self._watchdog = Watchdog(self._situation, self._patience, None, self._patience).__enter__()
        atexit.register(self.close)

    def close(self) -> None:
        """End the watchdog, if there is one; no rank waits for another."""
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None

    @contextmanager
    def during(self, place: Pipeline | str) -> Iterator[None]:
        """In an iteration of a pipeline; or in what takes as long as it takes, and is said where another rank asks."""
        self._place, self._moves = place, self._moves + 1
        try:
            yield
        except Exception as error:
            if self._watchdog is not None:
                self._watchdog.end_if_lost(error)
            raise
        finally:
            self._place, self._moves = None, self._moves + 1

    def _situation(self) -> Situation:
        """Position of this rank; asked from another thread."""
        if (place := self._place) is None:
            return Situation("its own code: it has not called forward_backward", (self._moves,))
        if isinstance(place, str):
            return Situation(place, (self._moves, time.monotonic_ns()))  # as long as it lasts nothing stands still
        mine = replace(place.situation, progress=(self._moves, *place.situation.progress))
        ends = "the start or the end of an iteration"
        return mine if mine.in_iteration else replace(mine, place=ends, in_iteration=True, waits_for_all=True)
