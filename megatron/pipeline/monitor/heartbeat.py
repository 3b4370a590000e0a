"""Signs of life through the rendezvous store: where each rank is, the first failure, and which rank prints it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch

_NEWS, _SPEAKER = "news", "speaker"
_PATIENCE = 2.0  # seconds for the store to answer a rank that ends; one that has stopped never answers


class Heartbeat:
    """Reads and writes on a thread of its own, because a store whose process is stopped does not answer and never will.

    Args:
        mine: returns this rank's state; called from that thread.
        interval: seconds between two exchanges.
        timeout: seconds to wait for the store, where that can be set.

    Attributes:
        heard: what every rank wrote last, by rank; it changes with every exchange.
        news: what went wrong first, as the ranks agreed; None while all is well.
        lost: why the store is gone; None while it is there.
    """

    def __init__(self, mine: Callable[[], str], interval: float, timeout: float) -> None:
        self.heard: list[str] = []
        self.news: str | None = None
        self.lost: Exception | None = None
        self._mine = mine
        self._interval = interval
        self._rank = torch.distributed.get_rank()
        self._keys = [str(rank) for rank in range(torch.distributed.get_world_size())]
        self._exchanges = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        # A connection of its own: the process group's may be blocked by the main thread.
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        server = torch.distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = torch.distributed.PrefixStore(f"megatron-pipeline-heartbeat/{restart}", server)
        self._say()

    @property
    def keeper(self) -> int | None:
        """The rank whose process keeps the store; None if the launcher does, as torchrun's."""
        return None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0

    def open(self) -> None:
        """Start exchanging. Every rank must have created its ``Heartbeat`` before."""
        self._exchange()
        self._thread.start()

    def close(self, patience: float = 0.0) -> None:
        """Exchange no more. An exchange that is under way may still fail, without a message.

        Args:
            patience: seconds to wait for its end: a process that exits normally meanwhile is aborted by the store's client.
        """
        self._closed.set()
        if patience:
            self._thread.join(patience)

    def announce(self, news: str) -> str:
        """Tell all ranks what went wrong, unless another rank was first; returns what the ranks will read."""
        self.news = self._first(_NEWS, news) or self.news or news
        return self.news

    def claim(self) -> bool:
        """Tell whether this rank prints the news: the first rank that asks does, and every rank that gets no answer."""
        return self._first(_SPEAKER, str(self._rank)) in (str(self._rank), None)

    def _first(self, key: str, value: str) -> str | None:
        """Value that was written first under a key, by this rank or by another; None if the store is gone or does not answer."""
        answers: list[str] = []

        def write() -> None:
            with suppress(Exception):
                answers.append(self._store.compare_set(key, "", value).decode())

        writer = threading.Thread(target=write, name=key, daemon=True)
        writer.start()
        writer.join(_PATIENCE)
        return answers[0] if answers else None

    def _run(self) -> None:
        while not self._closed.wait(self._interval):
            try:
                self._exchange()
            except torch.distributed.DistStoreError:  # no answer this time; the watchdog notices when there is none for long
                continue
            except Exception as error:
                self.lost = error
                return

    def _exchange(self) -> None:
        self._say()
        if self._store.check([_NEWS]):
            self.news = self._store.get(_NEWS).decode()
        self.heard = [text.decode() for text in self._store.multi_get(self._keys)]

    def _say(self) -> None:
        self._exchanges += 1
        self._store.set(str(self._rank), f"{self._exchanges}|{self._mine()}")
