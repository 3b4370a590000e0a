"""When a rank fails, is lost or hangs, all ranks end soon, and one message names that rank and the pass it was in.

Each rank writes its progress and reads that of the others twice a second (``heartbeat.py``). Its watchdog looks for a rank that
reported an exception, is silent, or blocks a pipeline in which nothing moves any more (``progress.py``). It then ends the
process, which is likely blocked in a wait for a rank that has gone. One rank prints the diagnosis: the lowest that is not
silent; if that one does not, another rank; and if the store does not answer, so that ranks cannot agree, every rank.
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
from megatron.pipeline.patches.torch_checkpoint import CheckpointError

from megatron.pipeline.distributed.groups import barrier
from megatron.pipeline.monitor.heartbeat import Heartbeat
from megatron.pipeline.monitor.progress import RanksSeen, Situation, diagnose, name_rank

_INTERVAL = 0.5  # seconds between two looks
_RANKS_PER_INTERVAL = 64  # larger worlds look less often: what the store sends grows with the square of the ranks
_SILENT_LOOKS = 4  # looks without a sign of life after which a suspected rank counts as silent
# Looks after the diagnosis: a rank reads it up to one look later, and must then find the store and a launcher that is running.
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
        situation: returns where this rank is; called from other threads.
        pipeline_timeout: seconds that an iteration may go without a pass on any rank.
        stuck_seconds: the same where ranks are outside their iteration, as at the start, in a save, and under stock schedules.
            None: a loop of which calls alone are known. Outside them a rank ends where another has found something, no sooner.
        silence_seconds: a rank without a sign of life for this long is lost.
        at_end: called, perhaps from another thread, before a failure ends the process.
    """

    def __init__(
        self,
        situation: Callable[[], Situation],
        pipeline_timeout: float = 300.0,
        stuck_seconds: float | None = 600.0,
        silence_seconds: float = 20.0,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        world = torch.distributed.get_world_size()
        self._place = situation
        self._interval = _INTERVAL * max(1.0, world / _RANKS_PER_INTERVAL)
        self._pipeline_timeout = pipeline_timeout
        self._always = stuck_seconds is not None
        self._stuck = pipeline_timeout if stuck_seconds is None else stuck_seconds
        self._at_end = at_end
        self._silence = max(silence_seconds, 2 * _SILENT_LOOKS * self._interval)
        self._rank = torch.distributed.get_rank()
        self._seen = RanksSeen(world, longest_gap=2 * self._interval)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._process = _this_process()
        self._heartbeat = Heartbeat(lambda: self._situation().to_text(), self._interval, timeout=self._silence)
        barrier()
        self._heartbeat.open()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            barrier()
        self._rest()
        if error is not None and not isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            # The launcher now ends the other ranks: they report first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            news, trace = self._blame(error), ""
            if news is None:
                news = f"{name_rank(self._rank, self._situation())} failed in {self._situation().place}: {in_words(error)}"
                is_worded = isinstance(error, CheckpointError)
                trace = f"Global rank {self._rank} failed{f': {error}' if is_worded else '.'}\n"
                trace += "" if is_worded else "".join(traceback.format_exception(error))
            self._end(news, trace)
        self._heartbeat.close(patience=self._silence)

    def close(self) -> None:
        """Watch no more; other ranks may go on. A process that ends does so first: the store's client would abort it."""
        self._rest()
        self._heartbeat.close(patience=self._silence)

    def end_if_lost(self, error: BaseException) -> None:
        """End this process, as ``__exit__`` does, if an exception of the main thread says no more than that a peer has gone."""
        if not _is_of_peer(error):
            return
        self._rest()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if news := self._blame(error):
            self._end(news)

    def _rest(self) -> None:
        self._ended.set()
        self._thread.join()

    def _situation(self) -> Situation:
        mine = self._place()
        elsewhere = mine.waits_for is not None or mine.of_device
        return replace(mine, line="" if elsewhere else _line_of_main_thread(), process=self._process)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval):
            if news := self._judge(self._silence):
                self._end(news)

    def _judge(self, silence: float) -> str | None:
        """Find what has gone wrong, if anything. Ranks without a sign of life for ``silence`` seconds are lost."""
        heartbeat, view = self._heartbeat, self._seen
        if heartbeat.news:
            return heartbeat.news
        mine = self._situation()
        watched = self._always or mine.in_iteration
        if heartbeat.lost:
            return f"the rank or launcher that keeps the rendezvous store is gone ({heartbeat.lost})" if watched else None
        view.look(heartbeat.heard, self._rank, mine, time.monotonic())
        if not watched:
            return None
        if lost := self._silent(silence):
            return diagnose(view.situations, lost).report()
        suspicious = _SILENT_LOOKS * self._interval
        still = f". No pass has finished for {view.still:.0f} s"
        if heartbeat.keeper is None and self._rank in view.silent(suspicious):
            # The launcher may have been stopped on purpose: no rank is lost as long as this one moves.
            news, passes = f"the launcher, which keeps the rendezvous store, is silent{still}", mine.in_iteration
        else:
            diagnosis = diagnose(view.situations, self._silent(suspicious))
            news, passes = diagnosis.report(still), diagnosis.in_iteration
        return news if view.still >= (self._pipeline_timeout if passes else self._stuck) else None

    def _silent(self, seconds: float) -> set[int]:
        """Ranks without a sign of life for this long. If this rank is among them, it is the store's keeper that is lost."""
        silent = self._seen.silent(seconds)
        if self._rank not in silent:
            return silent
        return set() if self._heartbeat.keeper is None else {self._heartbeat.keeper}

    def _blame(self, error: BaseException) -> str | None:
        """Find the other rank that failed or was lost just before an exception on this one; None if this one is to blame."""
        deadline = time.monotonic() + 2 * _SILENT_LOOKS * self._interval * _is_of_peer(error)
        while time.monotonic() < deadline:
            if news := self._judge(_SILENT_LOOKS * self._interval):
                return news
            time.sleep(self._interval / 2)
        return None

    def _end(self, news: str, trace: str = "") -> None:
        """Agree on the news with the other ranks, have one rank print them, and end this process.

        Args:
            trace: the traceback of this rank's own failure, if it has failed.
        """
        news = self._heartbeat.announce(news)
        self._heartbeat.close()  # the rank that keeps the store may be gone before the next exchange
        _print(trace)
        last = threading.Thread(target=self._at_end, daemon=True)
        last.start()
        last.join(self._interval)  # files of a server that is away would keep this process
        looks = 0
        silent = self._seen.silent(_SILENT_LOOKS * self._interval)
        heard = (rank for rank in range(torch.distributed.get_world_size()) if rank not in silent)
        if self._rank != next(heard, self._rank):  # the lowest rank that is not silent prints first
            time.sleep(_GRACE * self._interval)
            looks = _GRACE
        speaks = self._heartbeat.claim()
        if speaks:
            _print(f"Pipeline stopped: {news}\n")
        if speaks or trace:
            _tell_torchrun(news)
        time.sleep(((_LAST_LOOKS if speaks or trace else _LAST_LOOKS_OF_MUTE) - looks) * self._interval)
        for child in multiprocessing.active_children():  # megatron-core's checkpoint writer keeps one
            child.kill()
        os._exit(1)


def stuck_seconds(distributed_timeout_minutes: float) -> float:
    """After which time ranks that stand still outside an iteration are stuck: before the backend ends them without a word."""
    return 0.8 * 60 * distributed_timeout_minutes


def in_words(error: BaseException) -> str:
    """An exception in one line, with a second one on what to do if memory was short."""
    words = f"{type(error).__name__}: {error}"
    on_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return f"{words}\n    {_MEMORY_ADVICE}" if on_cpu or isinstance(error, torch.OutOfMemoryError) else words


def _is_of_peer(error: BaseException) -> bool:
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()


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
    if frame is None or threading.current_thread() is main:  # it is reporting an error, away from its place
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
