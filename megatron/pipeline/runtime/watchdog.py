"""A failed, lost or stuck rank ends all of them, soon, with a message on every rank that names it and the pass it was in.

Each rank says where it is and hears where the others are (``board.py``), twice a second. Its watchdog judges what it heard
(``situation.py``): a rank reported an exception, has fallen silent, or holds up a pipeline in which nothing moves any more.
It then prints the news and where its own rank is, and ends the process, which is likely blocked in a wait for somebody who
will not come.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

import torch

from megatron.pipeline.runtime.board import Board
from megatron.pipeline.runtime.situation import Situation, View, diagnose

_INTERVAL = 0.5  # seconds between two looks
_RANKS_PER_INTERVAL = 64  # larger worlds look less often: what the store sends grows with the square of the ranks
_SILENT_LOOKS = 4  # looks without a word after which a rank that is under suspicion counts as silent


class Watchdog:
    """A context around training. Entering and leaving it without error is collective.

    Args:
        situation: says where this rank is; called from other threads.
        pipeline_timeout: seconds that an iteration may go without a pass on any rank.
        stuck_seconds: the same where ranks are outside their iteration, as at the start, in a save, and under stock schedules.
        silence_seconds: a rank that has said nothing for so long is lost.
    """

    def __init__(
        self,
        situation: Callable[[], Situation],
        pipeline_timeout: float = 300.0,
        stuck_seconds: float = 600.0,
        silence_seconds: float = 20.0,
    ) -> None:
        world = torch.distributed.get_world_size()
        self._situation = situation
        self._interval = _INTERVAL * max(1.0, world / _RANKS_PER_INTERVAL)
        self._pipeline_timeout = pipeline_timeout
        self._stuck = stuck_seconds
        self._silence = max(silence_seconds, 2 * _SILENT_LOOKS * self._interval)
        self._rank = torch.distributed.get_rank()
        self._view = View(world, longest_gap=2 * self._interval)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._board = Board(lambda: self._situation().to_text(), self._interval, timeout=self._silence)
        torch.distributed.barrier()
        self._board.open()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            torch.distributed.barrier()
        self._ended.set()
        self._thread.join()
        if error is not None and not isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            # The launcher of a dead rank now ends the others: they have something to say first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            news = self._blame(error)
            if news is None:
                traceback.print_exception(error)
            self._end(news or f"rank {self._rank} failed in {self._situation().place}: {type(error).__name__}: {error}")
        self._board.close(patience=self._silence)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            news = self._judge(self._silence)
            if news:
                self._end(news)

    def _judge(self, silence: float) -> str | None:
        """What has gone wrong, if anything. Ranks that have said nothing for ``silence`` seconds are lost."""
        board, view = self._board, self._view
        if board.news:
            return board.news
        if board.lost:
            return f"the rank or launcher that keeps the rendezvous store is gone ({board.lost})"
        mine = self._situation()
        view.look(board.heard, self._rank, mine, time.monotonic())
        lost = self._silent(silence)
        if lost:
            return str(diagnose(view.situations, lost))
        suspicious = _SILENT_LOOKS * self._interval
        if board.keeper is None and self._rank in view.silent(suspicious):
            # The launcher may have been stopped on purpose: nothing is lost as long as this rank moves.
            found, passes = "the launcher, which keeps the rendezvous store, is silent", mine.in_iteration
        else:
            diagnosis = diagnose(view.situations, self._silent(suspicious))
            found, passes = str(diagnosis), diagnosis.in_iteration
        limit = self._pipeline_timeout if passes else self._stuck
        return f"{found}. No pass has finished for {view.still:.0f} s" if view.still >= limit else None

    def _silent(self, seconds: float) -> set[int]:
        """Ranks that have said nothing for so long. A store that answers nobody, not even this rank, accuses its keeper alone."""
        silent = self._view.silent(seconds)
        if self._rank not in silent:
            return silent
        return set() if self._board.keeper is None else {self._board.keeper}

    def _blame(self, error: BaseException) -> str | None:
        """Which other rank failed or was lost just before an exception on this one; None if this one is to blame."""
        lost_peer = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
        deadline = time.monotonic() + 2 * _SILENT_LOOKS * self._interval * lost_peer
        while time.monotonic() < deadline:
            news = self._judge(_SILENT_LOOKS * self._interval)
            if news:
                return news
            time.sleep(self._interval / 2)
        return None

    def _end(self, news: str) -> None:
        news = self._board.announce(news)
        self._board.close()  # the rank that keeps the store may be gone before the next exchange
        mine = self._situation()
        at = "" if mine.waits_for is not None else _line_of_main_thread()
        # One write, newline included: ranks share a stream.
        sys.stderr.write(f"rank {self._rank} ends because {news}\n    rank {self._rank} was in {mine}{at}\n")
        sys.stderr.flush()
        # A launcher kills all ranks when the first one ends: let the others read the news before.
        time.sleep(3 * self._interval)
        for child in multiprocessing.active_children():  # megatron-core's checkpoint writer keeps one
            child.kill()
        os._exit(1)


def _line_of_main_thread() -> str:
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    if frame is None or threading.current_thread() is main:  # it has left its place to tell of an error
        return ""
    innermost = traceback.extract_stack(frame, limit=1)[-1]
    return f" (at {innermost.filename}:{innermost.lineno} in {innermost.name})"
