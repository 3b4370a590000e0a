"""A failed, lost or stuck rank ends all of them, soon, with one message that names it and the pass it was in.

Each rank says where it is and hears where the others are (``heartbeat.py``), twice a second. Its watchdog judges what it heard
(``progress.py``): a rank reported an exception, has fallen silent, or holds up a pipeline in which nothing moves any more.
It then ends the process, which is likely blocked in a wait for a rank that will not come. One rank prints the verdict: the
lowest that others hear; if it does not, another one; and if the store does not answer, so that they cannot agree, every rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from megatron.core import parallel_state

from megatron.pipeline.health.heartbeat import Board
from megatron.pipeline.health.progress import Situation, View, diagnose, name_rank

_INTERVAL = 0.5  # seconds between two looks
_RANKS_PER_INTERVAL = 64  # larger worlds look less often: what the store sends grows with the square of the ranks
_SILENT_LOOKS = 4  # looks without a word after which a rank that is under suspicion counts as silent
# Looks after the verdict: a rank that hears it up to one look later must find a store, and a launcher that has not killed it.
_GRACE = 2  # before a rank other than the first one prints
_LAST_LOOKS = 5  # before a rank ends that has printed something: launchers show what the first one to end has printed
_LAST_LOOKS_OF_MUTE = 7  # before the others end
_MEMORY_ADVICE = (
    "Out of memory: `mpipe memory` computes what every rank needs, and `--offload full`, `--pipeline-schedule v-auto "
    "--pipeline-memory-limit 12GiB` and `--recompute-granularity selective` need less (docs/clusters.md, When memory is short)"
)


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
        self._place = situation
        self._interval = _INTERVAL * max(1.0, world / _RANKS_PER_INTERVAL)
        self._pipeline_timeout = pipeline_timeout
        self._stuck = stuck_seconds
        self._silence = max(silence_seconds, 2 * _SILENT_LOOKS * self._interval)
        self._rank = torch.distributed.get_rank()
        self._view = View(world, longest_gap=2 * self._interval)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._process = _this_process()
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
            news, trace = self._blame(error), ""
            if news is None:
                news = f"{name_rank(self._rank, self._situation())} failed in {self._situation().place}: {in_words(error)}"
                trace = f"Global rank {self._rank} failed.\n{''.join(traceback.format_exception(error))}"
            self._end(news, trace)
        self._board.close(patience=self._silence)

    def _situation(self) -> Situation:
        mine = self._place()
        return replace(mine, line="" if mine.waits_for is not None else _line_of_main_thread(), process=self._process)

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
            return diagnose(view.situations, lost).report()
        suspicious = _SILENT_LOOKS * self._interval
        still = f". No pass has finished for {view.still:.0f} s"
        if board.keeper is None and self._rank in view.silent(suspicious):
            # The launcher may have been stopped on purpose: nothing is lost as long as this rank moves.
            news, passes = f"the launcher, which keeps the rendezvous store, is silent{still}", mine.in_iteration
        else:
            diagnosis = diagnose(view.situations, self._silent(suspicious))
            news, passes = diagnosis.report(still), diagnosis.in_iteration
        return news if view.still >= (self._pipeline_timeout if passes else self._stuck) else None

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

    def _end(self, news: str, trace: str = "") -> None:
        """Agree on the news with the other ranks, have one rank print them, and end this process.

        Args:
            trace: the traceback of this rank's own failure, if it has failed.
        """
        news = self._board.announce(news)
        self._board.close()  # the rank that keeps the store may be gone before the next exchange
        _print(trace)
        looks = 0
        if self._rank != self._first_heard():
            time.sleep(_GRACE * self._interval)
            looks = _GRACE
        speaks = self._board.claim()
        if speaks:
            _print(f"Pipeline stopped: {news}\n")
        if speaks or trace:
            _tell_torchrun(news)
        time.sleep(((_LAST_LOOKS if speaks or trace else _LAST_LOOKS_OF_MUTE) - looks) * self._interval)
        for child in multiprocessing.active_children():  # megatron-core's checkpoint writer keeps one
            child.kill()
        os._exit(1)

    def _first_heard(self) -> int:
        """The lowest rank that is not silent."""
        silent = self._view.silent(_SILENT_LOOKS * self._interval)
        return next((rank for rank in range(torch.distributed.get_world_size()) if rank not in silent), self._rank)


def in_words(error: BaseException) -> str:
    """An exception in one line, with a second one on what to do if memory was short."""
    words = f"{type(error).__name__}: {error}"
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return f"{words}\n    {_MEMORY_ADVICE}" if on_cpu or isinstance(error, torch.OutOfMemoryError) else words


def _print(text: str) -> None:
    sys.stderr.write(text)  # one write, newline included: ranks share a stream
    sys.stderr.flush()


def _tell_torchrun(news: str) -> None:
    """Have torchrun show the news, without the places, in its own report of the rank that ended first."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        with suppress(OSError):
            text = news.partition("\n")[0]
            message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
            Path(file).write_text(json.dumps({"message": message}))


def _this_process() -> str:
    """Pipeline rank, device, host and process. Called by the main thread, which alone knows its current device."""
    device = f"GPU {torch.cuda.current_device()}" if torch.cuda.is_available() else "CPU"
    pipeline = ""
    if parallel_state.is_initialized():
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        pipeline = f"pipeline rank {parallel_state.get_pipeline_model_parallel_rank()} of {ranks}, "
    return f"{pipeline}{device} of {socket.gethostname()}, process {os.getpid()}"


def _line_of_main_thread() -> str:
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)
    if frame is None or threading.current_thread() is main:  # it has left its place to tell of an error
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
