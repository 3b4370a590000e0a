"""Processes that plan, so that the server stays awake: the newest job first, those that somebody waits for before those ahead."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

PATIENCE = 1.0  # seconds for which a job goes on that nobody waits for any more, since somebody may ask again
MOST_WAITING = 256  # jobs; the oldest ones give way


class Busy(Exception):
    """A job gave way to newer ones, or its process ended."""


@dataclass(eq=False)
class _Job:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    ahead: bool
    result: asyncio.Future[Any]
    waiting: int = 0  # how many ask for it
    process: multiprocessing.process.BaseProcess | None = None  # that runs it


@dataclass
class Workers:
    """Some processes, each with one job at a time. ``async with`` starts and ends them.

    Jobs ahead of what anybody looks at run on all processes but one, which is kept for those that somebody waits for.

    Args:
        count: of processes; 1 serves all kinds of jobs.
        warm_up: called in every process before its first job.
        preload: modules that a new process finds imported.
    """

    count: int
    warm_up: Callable[[], object]
    preload: list[str]
    _jobs: dict[Hashable, _Job] = field(default_factory=dict)  # waiting or running, the oldest first
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Workers:
        self._changed = asyncio.Condition()
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(self.preload)
        self._threads = ThreadPoolExecutor(2 * self.count, thread_name_prefix="worker")
        self._tasks = [asyncio.create_task(self._keep(ahead=self.count == 1 or slot > 0)) for slot in range(self.count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for job in self._jobs.values():
            job.result.cancel()
        self._threads.shutdown()

    async def run(self, function: Callable[..., Any], *arguments: Any, ahead: bool = False) -> Any:
        """What the function returns for the arguments; the same job is run once for all who ask for it at a time.

        If it is cancelled, a job that nobody else waits for is dropped, or ended with its process.

        Raises:
            Busy: there are newer jobs than can be remembered, or the process ended.
        """
        key = (function, arguments)
        job = self._jobs.get(key)
        if job is None or job.result.done():
            job = _Job(function, arguments, ahead, asyncio.get_running_loop().create_future())
            self._jobs[key] = job
            self._give_way()
        elif not ahead and job.process is None:
            job.ahead = False
            self._jobs[key] = self._jobs.pop(key)  # as new
        job.waiting += 1
        try:
            async with self._changed:
                self._changed.notify_all()
            return await asyncio.shield(job.result)
        finally:
            job.waiting -= 1
            if not job.waiting and not job.result.done():
                if job.process is None:
                    self._forget(job)
                else:
                    asyncio.get_running_loop().call_later(PATIENCE, _end_abandoned, job)

    def _give_way(self) -> None:
        waiting = [job for job in self._jobs.values() if job.process is None and not job.result.done()]
        for job in waiting[:-MOST_WAITING]:
            self._forget(job)
            job.result.set_exception(Busy("gave way to newer requests; ask again"))

    def _forget(self, job: _Job) -> None:
        key = (job.function, job.arguments)
        if self._jobs.get(key) is job:
            del self._jobs[key]

    def _next(self, ahead: bool) -> _Job | None:
        """The newest job that somebody waits for; else, if ``ahead``, the oldest of the others."""
        waiting = [job for job in self._jobs.values() if job.process is None]
        urgent = [job for job in waiting if not job.ahead]
        return urgent[-1] if urgent else waiting[0] if waiting and ahead else None

    async def _keep(self, ahead: bool) -> None:
        """Keep one process busy, and replace it where it ended."""
        process, end = await asyncio.to_thread(self._start)
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._next(ahead) is not None)
                    job = self._next(ahead)
                    assert job is not None, "just seen"
                    job.process = process
                try:
                    result = await asyncio.get_running_loop().run_in_executor(
                        self._threads, _ask, end, job.function, job.arguments
                    )
                except (EOFError, OSError):
                    if not job.result.done():
                        job.result.set_exception(Busy("the process that planned it was ended; ask again"))
                        job.result.exception()  # seen, even where nobody waits for it
                    _close(process, end)
                    process, end = await asyncio.to_thread(self._start)
                else:
                    if not job.result.done():
                        _settle(job.result, result)
                finally:
                    self._forget(job)
        finally:
            _close(process, end)

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self.warm_up), daemon=True)
        process.start()
        theirs.close()
        return process, ours


def _work(requests: Connection, warm_up: Callable[[], object]) -> None:
    """What a process does until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    warm_up()
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments = requests.recv()
            try:
                result = function(*arguments)
            except Exception as error:  # for the one who asks; the process goes on
                result = error
            requests.send(result)


def _ask(end: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    end.send((function, arguments))
    return end.recv()


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if isinstance(result, Exception):
        future.set_exception(result)
        future.exception()  # seen, even where nobody waits for it
    else:
        future.set_result(result)


def _end_abandoned(job: _Job) -> None:
    if not job.waiting and not job.result.done() and job.process is not None:
        job.process.kill()


def _close(process: multiprocessing.process.BaseProcess, end: Connection) -> None:
    process.kill()
    process.join(5)
    end.close()


def default_count() -> int:
    """One process per core that this one may use; at least 2, so that one is kept for who waits, and at most 4."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(4, cores))
