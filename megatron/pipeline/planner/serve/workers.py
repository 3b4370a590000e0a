"""Processes that plan while the server goes on answering: the job with the least work first, jobs ahead of a request last.

Those of ``concurrent.futures`` leave semaphores behind, and say so, where a signal ends the server; and none ends one job alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

from megatron.pipeline.planner.planning.children import end_with_parent

PATIENCE = 1.0  # seconds for which an abandoned job goes on, since its request may come again
MOST_WAITING = 256  # jobs; the oldest ones give way
ENDED = "the process that planned it was ended; ask again"
ENDING = "mpipe serve has been ended"


class Busy(Exception):
    """A job gave way to newer ones, its process ended, or all end."""


class Late(Busy):
    """A job took longer than ``Workers.limit``."""


@dataclass(eq=False)
class _PlanJob:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    ahead: bool
    work: float
    result: asyncio.Future[Any]
    waiting: int = 0  # how many ask for it
    process: multiprocessing.process.BaseProcess | None = None  # that runs it
    given_up: bool = False  # its process is being ended


@dataclass
class Workers:
    """Some processes, each with one job at a time. ``async with`` starts and ends them.

    Of the jobs that a request waits for, the one with the least work is next; of those with as much work, the newest. Jobs
    ahead of a request, and those with much work, run on all processes but one, which is kept for the others.

    Args:
        count: of processes; 1 serves all kinds of jobs.
        warm_up: called in every process before its first job.
        preload: modules that a new process finds imported.
        long: the work of a job from which on it is much.
        limit: seconds that a job may take.
    """

    count: int
    warm_up: Callable[[], object]
    preload: list[str]
    long: float = math.inf
    limit: float = 180.0
    _ending: bool = False
    _jobs: dict[Hashable, _PlanJob] = field(default_factory=dict)  # waiting or running, the oldest first
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Workers:
        self._changed = asyncio.Condition()
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(self.preload)
        resource_tracker.ensure_running()  # else the first start does it, which unblocks interrupts
        self._threads = ThreadPoolExecutor(2 * self.count, thread_name_prefix="worker")
        self._tasks = [asyncio.create_task(self._keep(all_kinds=self.count == 1 or slot > 0)) for slot in range(self.count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown()

    def refuse(self) -> None:
        """Refuse all jobs, waiting and new ones, so that none delays the end of the server."""
        self._ending = True
        for job in self._jobs.values():
            _settle(job.result, Busy(ENDING))

    async def run(self, function: Callable[..., Any], *arguments: Any, ahead: bool = False, work: float = 0) -> Any:
        """Result of the function for the arguments; the same job is run once for all who ask for it at a time.

        If it is cancelled, a job that no other request waits for is dropped, or ended with its process.

        Args:
            ahead: whether it is computed before a request needs it.
            work: how much work it is, in any unit.

        Raises:
            Busy: there are newer jobs than can be remembered, the process ended, or all end.
            Late: it took longer than ``limit``.
        """
        if self._ending:
            raise Busy(ENDING)
        key = (function, arguments)
        job = self._jobs.get(key)
        if job is None or job.result.done():
            job = _PlanJob(function, arguments, ahead, work, asyncio.get_running_loop().create_future())
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
                    asyncio.get_running_loop().call_later(PATIENCE, self._end_abandoned, job)

    def _give_way(self) -> None:
        waiting = [job for job in self._jobs.values() if job.process is None and not job.result.done()]
        for job in waiting[:-MOST_WAITING]:
            self._forget(job)
            _settle(job.result, Busy("gave way to newer requests; ask again"))

    def _forget(self, job: _PlanJob) -> None:
        key = (job.function, job.arguments)
        if self._jobs.get(key) is job:
            del self._jobs[key]

    def _end_abandoned(self, job: _PlanJob) -> None:
        if not job.waiting and not job.result.done() and job.process is not None:
            self._forget(job)  # who asks again from now on needs another process
            job.given_up = True
            job.process.kill()

    def _next(self, all_kinds: bool) -> _PlanJob | None:
        """The job with the least work that a request waits for, no long one unless ``all_kinds``; then also the oldest ahead."""
        waiting = [job for job in self._jobs.values() if job.process is None and not job.result.done()]
        urgent = [job for job in reversed(waiting) if not job.ahead and (all_kinds or job.work < self.long)]
        return min(urgent, key=lambda job: job.work) if urgent else waiting[0] if waiting and all_kinds else None

    async def _keep(self, all_kinds: bool) -> None:
        """Keep one process busy, and replace it where it ended."""
        process, end = await asyncio.to_thread(self._start)
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._next(all_kinds) is not None)
                    job = self._next(all_kinds)
                    assert job is not None, "just seen"
                    job.process = process
                try:
                    try:
                        result = await self._ask(end, job)
                    except BrokenPipeError:  # the process had ended before
                        _close(process, end)
                        process, end = await asyncio.to_thread(self._start)
                        job.process = process
                        result = await self._ask(end, job)
                except (EOFError, OSError) as error:
                    late = isinstance(error, TimeoutError)
                    _settle(job.result, Late(f"took more than {self.limit:g} s") if late else Busy(ENDED))
                    ended = True
                else:
                    _settle(job.result, result)
                    ended = job.given_up  # it may have answered just before
                finally:
                    self._forget(job)
                if ended:
                    _close(process, end)
                    process, end = await asyncio.to_thread(self._start)
        finally:
            _close(process, end)

    async def _ask(self, end: Connection, job: _PlanJob) -> Any:
        """Send a job to a process and return its result.

        Raises:
            BrokenPipeError: it had ended before.
            EOFError, OSError: it ended meanwhile, or (TimeoutError) should be, since it takes longer than ``limit``.
        """

        def ask() -> Any:
            end.send((job.function, job.arguments))
            return end.recv()

        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(self._threads, ask), self.limit)

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self.warm_up), daemon=True)
        # Ctrl-C is for the server, which ends all the others: they inherit that they do not hear of it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()
        return process, ours


def _work(requests: Connection, warm_up: Callable[[], object]) -> None:
    """Run jobs until the parent process ends."""
    end_with_parent()
    warm_up()
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments = requests.recv()
            try:
                result = function(*arguments)
            except Exception as error:  # for the one who asks; the process goes on
                result = error
            requests.send(result)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
        future.exception()  # marks it as seen where no request waits
    else:
        future.set_result(result)


def _close(process: multiprocessing.process.BaseProcess, end: Connection) -> None:
    process.kill()
    process.join(5)
    end.close()


def default_count() -> int:
    """One process per core that this one may use; at least 2, so that one is free for short jobs, and at most 4."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(4, cores))
