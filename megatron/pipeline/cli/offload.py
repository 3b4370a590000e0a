"""What offloading gains: what ``--json`` and the reports say of a schedule with copies to host memory, and k by size of a GPT."""

from __future__ import annotations

import argparse
import math
from typing import Any

from megatron.pipeline.cli.arguments import COPIES
from megatron.pipeline.costmodel.offload import DEVICES, HIDDEN_SIZES, SEQUENCE_LENGTHS, grid
from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import Kind, Offload
from megatron.pipeline.schedule.core.problem import Problem
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.schedule.transforms.offload import host_peaks, moved
from megatron.pipeline.schedule.transforms.transform import without_copies
from megatron.pipeline.view.table import plain_table

_READ = """\
k by hidden size and sequence length, of models whose heads share 8 groups: the time in which a layer's activations are copied to
host memory and back, over the time of its F, B and W. A100: 220 TFLOP/s and 15 GB/s either way; H100: 440 and 21.
How to read it: up to 1 --offload full can move everything, up to 2 half of it; above that, what there is time for. A plan is
never longer with offload: a larger k saves less. A k is said by --cost D2H=..,H2D=.., each k/2 of F + B + W. Norms, activation
functions and dropout are made again here; where F keeps what they put out as well, k is about 1.75 times as much."""


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


def k_table() -> str:
    """k over hidden size and sequence length, and how to read it."""
    tables = []
    for name, device in DEVICES.items():
        cells = [[str(hidden), *(f"{k:.2f}" for k in row)] for hidden, row in zip(HIDDEN_SIZES, grid(device), strict=True)]
        tables.append(
            f"k, {name}, by hidden size and sequence length\n{plain_table(['hidden', *map(str, SEQUENCE_LENGTHS)], cells)}"
        )
    return "\n\n".join([*tables, _READ])
