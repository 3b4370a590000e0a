"""The processes that plan for ``mpipe serve``: who goes first, who is kept off, and what happens to a process that ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from pool import PRELOADED

from megatron.pipeline.planner.serve import workers
from megatron.pipeline.planner.serve.workers import Busy, Late, Workers


def with_workers(count: int, use: Any) -> Any:
    """What a coroutine function makes of that many workers."""

    async def run() -> Any:
        # A process has one fork server: with nothing preloaded, all ranks of later tests would import for seconds.
        async with Workers(count, os.getpid, list(PRELOADED)) as pool:
            return await asyncio.wait_for(use(pool), 60)

    return asyncio.run(run())


@contextlib.asynccontextmanager
async def occupied(pool: Workers, folder: Path) -> AsyncIterator[None]:
    """The pool's only process has a job that ends when this does."""
    os.mkfifo(folder / "fifo")
    job = asyncio.create_task(pool.run(Path.read_text, folder / "fifo"))
    with await asyncio.to_thread(open, folder / "fifo", "w"):  # waits for the reader
        yield
        await asyncio.sleep(0.1)  # until what was asked for meanwhile is in line
    await job


def test_the_least_work_goes_first_then_the_newest_and_what_is_ahead_last(tmp_path: Path) -> None:
    ended: list[str] = []

    async def use(pool: Workers) -> None:
        async def job(name: str, seconds: float) -> None:
            await pool.run(time.sleep, seconds, ahead="ahead" in name, work=2 if "slow" in name else 1)
            ended.append(name)

        async with occupied(pool, tmp_path):
            names = ["ahead", "old", "ahead too", "new", "slow"]
            asked = [asyncio.create_task(job(name, 0.01 + at / 100)) for at, name in enumerate(names)]
        await asyncio.gather(*asked)

    with_workers(1, use)
    assert ended == ["new", "old", "slow", "ahead", "ahead too"]


def test_what_is_ahead_leaves_a_process_free() -> None:
    async def use(pool: Workers) -> None:
        ahead = [asyncio.create_task(pool.run(time.sleep, 3600 + i, ahead=True)) for i in range(3)]
        await asyncio.sleep(0.2)
        await pool.run(time.sleep, 0.01)
        assert not any(task.done() for task in ahead)
        for task in ahead:
            task.cancel()

    with_workers(2, use)


def test_what_may_take_long_leaves_a_process_free() -> None:
    async def use(pool: Workers) -> None:
        pool.long = 5
        long = [asyncio.create_task(pool.run(time.sleep, 3600 + i, work=5)) for i in range(3)]
        await asyncio.sleep(0.2)
        await pool.run(time.sleep, 0.01)
        assert not any(task.done() for task in long)
        for task in long:
            task.cancel()

    with_workers(2, use)


def test_a_job_is_ended_at_the_limit() -> None:
    async def use(pool: Workers) -> int:
        pool.limit = 0.1
        with pytest.raises(Late, match=r"took more than 0.1 s"):
            await pool.run(time.sleep, 3600)
        pool.limit = 60
        return await pool.run(os.getpid)

    assert with_workers(1, use)


def test_a_process_that_was_ended_before_costs_nobody_an_answer() -> None:
    async def use(pool: Workers) -> tuple[int, int]:
        before = await pool.run(os.getpid)
        process = psutil.Process(before)
        process.kill()
        process.wait(30)
        return before, await pool.run(os.getpid)

    before, after = with_workers(1, use)
    assert before != after


def test_the_end_is_told_to_all_who_wait_or_ask() -> None:
    async def use(pool: Workers) -> list[Any]:
        asked = [asyncio.create_task(pool.run(time.sleep, 3600 + i)) for i in range(2)]
        await asyncio.sleep(0.1)
        pool.refuse()
        return await asyncio.gather(*asked, pool.run(os.getpid), return_exceptions=True)

    assert [str(one) for one in with_workers(1, use)] == [workers.ENDING] * 3


def test_the_same_job_is_run_once_for_all_who_ask(tmp_path: Path) -> None:
    async def use(pool: Workers) -> list[str]:
        async with occupied(pool, tmp_path):
            asked = [asyncio.create_task(pool.run(tempfile.mkdtemp, "", "made", str(tmp_path))) for _ in range(5)]
            await asyncio.sleep(0.1)
            asked[0].cancel()  # the others still wait for it
        return await asyncio.gather(*asked[1:])

    made = with_workers(1, use)
    assert len(set(made)) == 1 and len(list(tmp_path.glob("made*"))) == 1


def test_a_job_that_nobody_waits_for_is_dropped_or_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.1)

    async def use(pool: Workers) -> tuple[int, int]:
        before = await pool.run(os.getpid)
        endless = asyncio.create_task(pool.run(time.sleep, 3600))
        waiting = asyncio.create_task(pool.run(time.sleep, 3601))
        await asyncio.sleep(0.3)
        endless.cancel()
        waiting.cancel()
        return before, await pool.run(os.getpid)

    before, after = with_workers(1, use)
    assert before != after


def test_a_job_that_ends_while_it_is_given_up_costs_nobody_else_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PATIENCE", 0.05)

    async def use(pool: Workers) -> tuple[int, int]:
        before = await pool.run(os.getpid)
        given_up = asyncio.create_task(pool.run(time.sleep, 0.1))
        await asyncio.sleep(0.05)
        given_up.cancel()
        after = asyncio.create_task(pool.run(os.getpid))
        await asyncio.sleep(0.01)
        time.sleep(0.3)  # the loop then finds the result, and that nobody has waited for it, at once
        return before, await after

    before, after = with_workers(1, use)
    assert before != after


def test_too_many_jobs_give_way_to_newer_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workers, "MOST_WAITING", 2)

    async def use(pool: Workers) -> list[Any]:
        async with occupied(pool, tmp_path):
            asked = [asyncio.create_task(pool.run(time.sleep, 0.01 + at / 100)) for at in range(4)]
        return await asyncio.gather(*asked, return_exceptions=True)

    told = with_workers(1, use)
    assert [isinstance(one, Busy) for one in told] == [True, True, False, False]


def test_what_a_job_raises_is_raised_and_its_process_goes_on() -> None:
    async def use(pool: Workers) -> tuple[int, int]:
        before = await pool.run(os.getpid)
        with pytest.raises(ValueError, match="math domain"):
            await pool.run(__import__("math").sqrt, -1)
        return before, await pool.run(os.getpid)

    before, after = with_workers(1, use)
    assert before == after
