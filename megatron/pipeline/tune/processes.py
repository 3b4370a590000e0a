"""Start ranks as processes of this machine, and wait until all of them have done their work."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from megatron.pipeline.distributed.processes import free_port

Tell = Callable[[str], object]  # what a rank is at; said again and again while it is

_PATIENCE = 2.0  # seconds for the rank whose death makes others fail to be seen dead


class RankFailed(RuntimeError):
    """A rank died, failed or hung; one line says which, where and how."""


def run(work: Callable[[Any, Tell], object], job: Any, ranks: int, silence: float) -> None:
    """Call ``work(job, tell)`` on every rank of a world.

    Args:
        work: a function at the top of a module.
        silence: seconds that a rank may go without telling.

    Raises:
        RankFailed: all ranks have been ended.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    listeners = []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(work, job, theirs, rank, ranks, port), daemon=True)
            process.start()
            theirs.close()
            listeners.append(_Listener(rank, process, ours))
        _listen(listeners, silence)
    finally:
        for one in listeners:
            one.end()


class _Listener:
    """Facts about one rank: what it is at, since when, and how it ended."""

    def __init__(self, rank: int, process: SpawnProcess, connection: Connection) -> None:
        self.rank, self.process, self.connection = rank, process, connection
        self.at, self.heard = "start-up", time.monotonic()
        self.failure: str | None = None
        self.died = self.done = False

    def read(self) -> None:
        """Take one message, or notice that there will be no more."""
        self.heard = time.monotonic()
        try:
            kind, content = self.connection.recv()
        except EOFError:
            self.process.join(timeout=_PATIENCE)
            code = self.process.exitcode
            self.died = True
            self.failure = f"died (signal {-code})" if code is not None and code < 0 else f"ended with status {code}"
            return
        if kind == "at":
            self.at = content
        elif kind == "failed":
            self.failure = content
        else:
            self.done = True

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _listen(listeners: list[_Listener], silence: float) -> None:
    until: float | None = None  # when to stop waiting for more failures
    while not all(one.done for one in listeners):
        waited = [one for one in listeners if not one.done and one.failure is None]
        now = time.monotonic()
        ends = [one.heard + silence for one in waited] if until is None else [until]
        ready: list[Any] = wait([one.connection for one in waited], timeout=max(0.0, min(ends, default=now) - now))
        for one in waited:
            if one.connection in ready:
                one.read()
        failed = [one for one in listeners if one.failure is not None]
        if failed and until is None:
            until = time.monotonic() + _PATIENCE
        if failed and (not waited or any(one.died for one in failed) or time.monotonic() >= (until or 0.0)):
            # Ranks that lose a peer fail as well: the one that died, or that failed first, is why.
            one = min(failed, key=lambda one: (not one.died, one.heard))
            raise RankFailed(f"rank {one.rank} of {len(listeners)} {one.failure}, at: {one.at}")
        if not ready and not failed:
            one = min(waited, key=lambda one: one.heard)
            raise RankFailed(f"rank {one.rank} of {len(listeners)} has said nothing for {silence:g} s, at: {one.at}")


def _serve(work: Callable[[Any, Tell], object], job: Any, connection: Connection, rank: int, ranks: int, port: int) -> None:
    """A rank, from torchrun's environment to the last message."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in world.items()}, MASTER_ADDR="localhost")
    try:
        work(job, lambda text: connection.send(("at", text)))
    except KeyboardInterrupt:
        return
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        connection.send(("failed", f"failed ({type(error).__name__}: {lines[0][:200]})"))
    else:
        connection.send(("done", ""))
