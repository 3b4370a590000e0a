"""One failed rank ends all of them, soon, with a message on every rank that names it and the pass it was in.

Each rank's watchdog thread tells a shared store where its rank is, twice a second, and looks there for bad news: a rank
that reported an exception, or one that has fallen silent because its process is gone. It then prints the news and ends
its own process, which is likely blocked in a collective that nobody will complete.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

import torch

_INTERVAL = 0.5  # seconds between two looks
_FAILED = "failed"


class Watchdog:
    """A context around training. Entering and leaving it without error is collective.

    Args:
        where: says what this rank is doing, such as ``"Compute B3.0 of iteration 12"``; called from another thread.
        silence_seconds: a rank that has not reported for so long counts as dead.
        stuck_seconds: a rank that has not moved for so long counts as stuck; None to leave that to the communication
            backend's own timeout.
        progress: a value that changes whenever this rank moves; ``where`` if not given.
    """

    def __init__(
        self,
        where: Callable[[], str],
        silence_seconds: float = 20.0,
        stuck_seconds: float | None = None,
        progress: Callable[[], object] | None = None,
    ) -> None:
        self._where = where
        self._progress = progress or where
        self._moved: tuple[object, float] = (None, 0.0)  # the last progress, and when it changed
        self._silence = silence_seconds
        self._stuck = stuck_seconds
        self._rank = torch.distributed.get_rank()
        self._world = torch.distributed.get_world_size()
        self._ended = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}  # what each rank last said, and when that changed
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        # A connection of its own: the process group's may be blocked by the main thread.
        server = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=self._silence),
        )
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = torch.distributed.PrefixStore(f"megatron-pipeline-watchdog/{restart}", server)
        self._report()
        torch.distributed.barrier()
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
            self._end(self._cause(error))

    def _watch(self) -> None:
        try:
            while not self._ended.wait(_INTERVAL):
                self._report()
                news = self._news(self._silence) or self._stuck_here()
                if news:
                    self._end(news)
        except Exception as error:  # the store is gone, and with it the rank or agent that kept it
            if not self._ended.is_set():
                self._end(f"the rank or launcher that keeps the rendezvous store is gone ({error})")

    def _report(self) -> None:
        self._store.set(str(self._rank), f"{time.monotonic()}|{self._where()}")

    def _news(self, silence: float) -> str | None:
        """What has gone wrong elsewhere, if anything."""
        if self._store.check([_FAILED]):
            return self._store.get(_FAILED).decode()
        now = time.monotonic()
        others = [rank for rank in range(self._world) if rank != self._rank]
        for rank, said in zip(others, self._store.multi_get([str(rank) for rank in others]), strict=True):
            text = said.decode()
            if rank not in self._seen or self._seen[rank][0] != text:
                self._seen[rank] = text, now
            elif now - self._seen[rank][1] > silence:
                return f"rank {rank} died: it has been silent for {silence:.0f} s, and was last in {text.split('|', 1)[1]}"
        return None

    def _stuck_here(self) -> str | None:
        progress, now = self._progress(), time.monotonic()
        last, since = self._moved
        if progress != last:
            self._moved = progress, now
        elif self._stuck is not None and now - since > self._stuck:
            said = self._store.multi_get([str(rank) for rank in range(self._world)])
            everyone = "; ".join(f"rank {rank} in {text.decode().split('|', 1)[1]}" for rank, text in enumerate(said))
            return f"nothing has moved on rank {self._rank} for {now - since:.0f} s. The ranks are stuck: {everyone}"
        return None

    def _cause(self, error: BaseException) -> str:
        """Who is to blame for an exception on this rank: itself, unless another rank failed or died just before."""
        mine = f"rank {self._rank} failed in {self._where()}: {type(error).__name__}: {error}"
        lost_peer = isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
        patience = 4.0 if lost_peer else 0.0
        try:
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                self._report()
                news = self._news(silence=4 * _INTERVAL)
                if news:
                    return news
                time.sleep(_INTERVAL / 2)
            return self._store.compare_set(_FAILED, "", mine).decode()
        except Exception:
            return mine

    def _end(self, news: str) -> None:
        with suppress(Exception):  # nobody may be left to tell
            news = self._store.compare_set(_FAILED, "", news).decode() or news
        print(f"rank {self._rank} ends because {news}", file=sys.stderr, flush=True)
        # A launcher kills all ranks when the first one ends: let the others read the news before.
        time.sleep(3 * _INTERVAL)
        for child in multiprocessing.active_children():  # megatron-core's checkpoint writer keeps one
            child.kill()
        os._exit(1)
