"""What offloading gains: the numbers that ``--json`` and the reports give for a schedule with copies to host memory."""

from __future__ import annotations

import argparse
import math
from typing import Any

from megatron.pipeline.cli.arguments import COPIES
from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import Kind, Offload
from megatron.pipeline.schedule.core.problem import Problem
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.schedule.transforms.offload import host_peaks, moved
from megatron.pipeline.schedule.transforms.transform import without_copies


def wanted(options: argparse.Namespace) -> Offload | None:
    """What ``--offload`` says.

    Raises:
        ValueError: flags are given that mean nothing without it.
    """
    given = vars(options)
    if given.get("offload") not in (None, "off"):
        return Offload(given["offload"])
    if given.get("host_memory_limit") is not None:
        raise ValueError("--host-memory-limit is for what --offload moves: give --offload selective or full, or leave it out")
    return None


def check_costs(options: argparse.Namespace) -> None:
    """Refuse costs of copies that nothing needs.

    Raises:
        ValueError: there are some.
    """
    named = [name for name in COPIES if name in (options.cost or {})]
    if named or options.copy:
        flag = f"--cost {named[0]}=.." if named else "--copy"
        raise ValueError(f"{flag} is of copies to host memory: give --offload selective or full, or leave it out")


def gain(schedule: Schedule, problem: Problem) -> dict[str, Any]:
    """What ``--json`` says of a schedule with copies; memory is in the costs' unit.

    Returns:
        ``mode`` (None for copies that are a user's own), ``k``, by rank what is ``moved`` in an iteration, the ``moved_share`` of
        what all F allocate, and ``host_peak``; and ``peak_without`` and ``span_without`` of the same passes without copies.
    """
    costs = problem.costs
    plain = without_copies(schedule)
    allocated = _allocated(plain, costs)
    away = moved(schedule, costs)
    return {
        "mode": problem.offload and str(problem.offload),
        "k": costs.k(problem.recompute),
        "moved": away,
        "moved_share": [part / whole if whole else 0.0 for part, whole in zip(away, allocated, strict=True)],
        "peak_without": activation_peaks(plain, costs),
        "host_peak": host_peaks(schedule, costs),
        **({} if problem.host_limit in (None, math.inf) else {"host_limit": problem.host_limit}),
        "span_without": simulate(plain, costs).span,
    }


def _allocated(schedule: Schedule, costs: Costs) -> list[float]:
    """What all F of a rank allocate in an iteration."""
    sliced = costs.sliced(schedule.splits)
    return [
        sum(
            sliced.stages[schedule.placement.stage(rank, work.chunk)].allocated(Kind.F, schedule.recomputes(rank, work))
            for work in row
            if work.kind is Kind.F
        )
        for rank, row in enumerate(schedule.passes)
    ]
