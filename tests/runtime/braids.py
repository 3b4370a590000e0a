"""Braids put into any schedule, whether they make it shorter or not: as many as there can be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.transforms import braid
from megatron.pipeline.runtime import iteration
from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.p2p import Tensors


def braided(schedule: Schedule) -> Schedule:
    """With every pair of neighbours as a braid that keeps no rank waiting for ever."""
    best = schedule
    for pair in braid._pairs(schedule, over_weights=False):
        tried = braid._with(best, [pair])
        try:
            verify(tried)
        except ScheduleError:
            continue
        best = tried
    return best


class BraidingExecutor(Executor):
    """Counts braids, of all iterations of this process.

    Attributes:
        braids: by the kind of the backward.
        beside: whose output left on another stream than the backward computes on.
    """

    braids: Counter[str] = Counter()  # noqa: RUF012
    beside = 0

    def _compute(self, work: Pass, other: Pass | None) -> None:
        if other is not None:
            self.braids[other.kind.value] += 1
        self._main = torch.cuda.current_stream() if torch.cuda.is_available() else None
        super()._compute(work, other)

    def _send_within_braid(self, work: Pass, outputs: Tensors) -> None:
        if self._main is not None and torch.cuda.current_stream() != self._main:
            type(self).beside += 1
        super()._send_within_braid(work, outputs)


def install(run: Any) -> None:
    """Have a pipeline's training iterations braid."""
    plan, made = run.pipeline.plans.plan, dict[Any, Planned]()

    def with_braids(microbatches: int, forward_only: bool = False) -> Planned:
        key = microbatches, forward_only
        if key not in made:
            own = plan(microbatches, forward_only)
            made[key] = own if forward_only else replace(own, schedule=braided(own.schedule))
        return made[key]

    run.pipeline.plans.plan = with_braids
    BraidingExecutor.braids.clear()
    BraidingExecutor.beside = 0
    iteration.Executor = BraidingExecutor  # type: ignore[attr-defined, misc]


def uninstall() -> None:
    iteration.Executor = Executor  # type: ignore[attr-defined, misc]
