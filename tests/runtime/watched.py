"""Trainings that tests/runtime/test_watch.py runs on the pool: over a link that is slow for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import tiny_gpt
import torch
from example_runs import example, optimizer_of
from megatron.core.utils import get_model_config
from optimizer import injected_runs
from runtime.batches import _make_groups, _Unequal, on_time

from megatron.pipeline import install
from megatron.pipeline.planner.planning.aside import PlanningProcess
from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.p2p import Channels
from megatron.pipeline.session.reports import Reports


class Trained(NamedTuple):
    """Findings of a rank.

    Attributes:
        steps: losses and norms.
        lines: for the log.
        slow: of every iteration, the fields that metrics have.
        planned: of every iteration, whether its order of passes is one for a slow link.
    """

    steps: list[tuple[float | None, float]]
    lines: list[str]
    slow: list[list[dict[str, Any]]]
    planned: list[bool]


class SlowGroup:
    """A process group whose messages leave later; the sender goes on."""

    def __init__(self, group: Any, seconds: float, thread: ThreadPoolExecutor) -> None:
        self._group, self._seconds, self._thread = group, seconds, thread

    def send(self, *given: Any) -> Any:
        due, numbers = time.monotonic() + self._seconds, given

        def later() -> Any:
            time.sleep(max(0.0, due - time.monotonic()))
            self._group.send(*numbers).wait()

        sent = self._thread.submit(later)
        return type("Work", (), {"wait": lambda _: sent.result(), "is_completed": lambda _: sent.done()})()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextmanager
def slow_link(link: tuple[int, int], seconds: list[float]) -> Iterator[None]:
    """Messages between two ranks of the world take that much longer, both ways.

    Args:
        seconds: one number, which may change.
    """
    group = Channels.group

    def slow(channels: Channels, sender: int, receiver: int) -> Any:
        real = group(channels, sender, receiver)
        if seconds[0] and {channels.ranks[sender], channels.ranks[receiver]} == set(link) and channels.rank == sender:
            return SlowGroup(real, seconds[0], threads[receiver > sender])
        return real

    with ThreadPoolExecutor(1) as up, ThreadPoolExecutor(1) as down, patch.object(Channels, "group", slow):
        threads = (down, up)
        yield


@contextmanager
def slow_passes(seconds: float = 0.004) -> Iterator[None]:
    """Passes take longer than what other processes take from one."""
    compute = Executor._compute

    def computing(*given: Any) -> None:
        time.sleep(seconds)
        compute(*given)

    with patch.object(Executor, "_compute", computing):
        yield


def train(
    schedule: str, mode: str, ends: int = 60, seconds: float = 0.03, slow_rank: int | None = None, every_batch: bool = False
) -> Trained:
    """Train as usual, with a link 1-2 that is slow in iterations 10 to 18, until it has been found to be as usual again.

    Args:
        slow_rank: takes three times as long as others, from the start.
        every_batch: microbatches are of unequal lengths, which are announced.
    """
    flags = ("--num-layers", "8", "--pipeline-watch", mode, *(("--pipeline-plan", "every-batch") if every_batch else ()))
    run = (_Unequal if every_batch else tiny_gpt.Run)(schedule, pp=4, microbatches=8, flags=flags)
    reports, more, found = Reports(run.args, run.pipeline), [0.0], Trained([], [], [], [])
    for chunk in run.chunks:
        get_model_config(chunk).variable_seq_lengths = every_batch
    passes = slow_passes(0.012 if torch.distributed.get_rank() == slow_rank else 0.004)
    with slow_link((1, 2), more), patch.object(PlanningProcess, "plan", on_time), passes:
        for iteration in range(ends):
            is_over = any("as usual again" in line and "link 1-2" in line for line in found.lines)
            more[0] = seconds if 9 <= iteration < 18 else 0.0
            if isinstance(run, _Unequal) and run.pipeline.batches:
                for announced in (iteration, iteration + 1)[iteration > 0 :]:
                    run.pipeline.batches.announce([[length] * 2 for length in run.lengths(announced)])
            found.steps.append(run.step(iteration))
            assert run.pipeline._iteration is not None
            found.planned.append(any(link.latency > 0.01 for link in run.pipeline._iteration.plan.problem.costs.links))
            measured = reports.measured(iteration + 1, run.pipeline.start_report(), wanted=True)
            found.slow.append(measured.slow if measured else [])
            found.lines.extend(reports.use(iteration + 1))
            if is_over:
                break
    return found


def whole(flags: str, link: tuple[int, int]) -> tuple[Any, list[str], list[bool]]:
    """A training of ``pretrain_gpt.py`` over a link that is slow from its tenth iteration on.

    Returns:
        Steps and digests of weights and state, lines of the watch, and whether iterations have run in an order for the link.
    """
    more, lines, planned, use = [0.0], list[str](), list[bool](), Reports.use

    def used(reports: Any, iteration: int) -> list[str]:
        more[0] = 0.03 if iteration >= 9 else 0.0
        lines.extend(found := use(reports, iteration))
        planned.append(any(one.latency > 0.01 for one in reports._pipeline._iteration.plan.problem.costs.links))
        return found

    with slow_link(link, more), patch.object(PlanningProcess, "plan", on_time), slow_passes(), patch.object(Reports, "use", used):
        told, digests, _ = injected_runs.train(flags, {})
    return (told, digests), lines, planned


def loop(schedule: str, watch: str, ends: int = 18) -> tuple[list[Any], list[str]]:
    """Losses and norms of a loop of its own, over a link 1-2 that becomes slow, and what is logged on this rank."""
    own, lines, more = example("own_training_loop"), list[str](), [0.0]
    placement = install(schedule, watch=watch).pipeline(4).placement
    _make_groups(placement.chunks)
    chunks = own.wrap(own.build())
    optimizer, steps = optimizer_of(chunks), list[Any]()
    logged = patch.object(logging.getLogger("megatron.pipeline.session.own_loop"), "warning", lambda _, line: lines.append(line))
    with logged, slow_link((1, 2), more), patch.object(PlanningProcess, "plan", on_time), slow_passes():
        for number in range(ends):
            more[0] = 0.03 if number >= 8 else 0.0
            reports, norm = own.run(chunks, own.batches(8, seed=number), optimizer)
            steps.append(([float(one.mean()) for one in reports], float(norm)))
    return steps, lines
