"""``mpipe compare``: every schedule under the same costs and limit, best first."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.pipeline.cli.arguments import Commands, cost_flags, names, report_flags, size_flags, whole_numbers
from megatron.pipeline.cli.case import Case
from megatron.pipeline.cli.costs import costs_of
from megatron.pipeline.cli.draw import page
from megatron.pipeline.cli.plan import Planned, plan
from megatron.pipeline.cli.summary import plain_table
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.costs import Costs, StageCosts
from megatron.pipeline.schedule.simulate import activation_peaks
from megatron.pipeline.view import Point, draw_pareto

_SUFFIXES = (".json", ".html", ".png", ".svg")
_REPORTED = (
    *("schedule", "chunks", "makespan", "span", "bubble_rate", "makespan_bubble_rate", "peak_activation"),
    *("lower_bound", "gap", "makespan_lower_bound", "makespan_gap", "plan_seconds"),
)


def add(commands: Commands) -> None:
    help = "plan all schedules under the same costs and limit, best first"
    parser = commands.add_parser("compare", help=help, description=help, parents=[size_flags(), cost_flags(), report_flags()])
    parser.add_argument("--schedules", type=names, metavar="A,B,..", help="these only (default: all)")
    parser.add_argument(
        "--chunks", type=whole_numbers, metavar="V,V2", help="chunks per rank to try, for families that take several numbers"
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Row:
    """One schedule of the comparison: what was planned, and what ``mpipe plan`` reports about it."""

    label: str
    planned: Planned
    report: dict[str, Any]

    @property
    def case(self) -> Case:
        return self.planned.case

    @property
    def peak(self) -> float:
        return max(self.report["peak_activation"])

    @property
    def gap(self) -> float:
        return self.report["makespan_gap" if self.report["objective"] == "makespan" else "gap"]


def run(options: argparse.Namespace) -> None:
    if options.output and Path(options.output).suffix not in _SUFFIXES:
        raise ValueError(f"cannot write {options.output}: the file name must end in {' or '.join(_SUFFIXES)}")
    rows, refused = compare(options)
    if not rows:
        raise ValueError("no schedule fits: " + "; ".join(f"{label}: {reason}" for label, reason in refused.items()))
    whole = peak_of_1f1b(options)
    data = _data(options, rows, refused, whole)
    if options.output and Path(options.output).suffix == ".html":
        cases = {row.label: row.case for row in rows}
        page(options.output, {label: case.timeline() for label, case in cases.items()}, cases)
    elif options.output and Path(options.output).suffix in (".png", ".svg"):
        _plot(options, rows, whole)
    elif options.output:
        Path(options.output).write_text(json.dumps(data) + "\n", encoding="utf-8")
    elif options.json:
        print(json.dumps(data))
    else:
        _print_table(rows, refused, whole)


def compare(options: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """Plan every schedule that is asked for.

    Returns:
        Those that exist for these sizes, costs and limit, the shortest first, by the objective and then by memory; and for
        each of the others the reason.

    Raises:
        ValueError: a name is unknown.
    """
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for name in dict.fromkeys(options.schedules or families.FAMILIES):
        if name not in families.FAMILIES:
            raise ValueError(f"unknown schedule {name!r}; known are {', '.join(families.FAMILIES)}")
        several = families.FAMILIES[name].any_chunks and options.chunks
        for chunks in dict.fromkeys(options.chunks) if several else [None]:
            label = name if chunks is None else f"{name} v={chunks}"
            try:
                planned = plan(options, name, chunks)
            except ValueError as error:
                refused[label] = str(error)
            else:
                rows.append(Row(label, planned, planned.case.report(planned.seconds)))
    rows.sort(key=lambda row: (row.report[options.objective], row.peak))
    return rows, refused


def peak_of_1f1b(options: argparse.Namespace) -> float | None:
    """The most that a rank of 1F1B holds under the same costs, where the model can be cut into one stage per rank."""
    placement = families.placement("1f1b", options.pp)
    if options.costs:
        parts, rest = divmod(len(options.costs.stages), options.pp)
        if rest:
            return None
        held = [stage.activation for stage in options.costs.stages]
        sums = [sum(held[rank * parts : (rank + 1) * parts]) for rank in range(options.pp)]
        costs = Costs(tuple(StageCosts(0, 0, 0, whole, whole) for whole in sums))
    else:
        costs = costs_of(options, placement)
    return max(activation_peaks(families.plan("1f1b", options.pp, options.microbatches, costs), costs))


def _data(options: argparse.Namespace, rows: list[Row], refused: dict[str, str], whole: float | None) -> dict[str, Any]:
    return {
        "pp": options.pp,
        "microbatches": options.microbatches,
        "objective": options.objective,
        "memory_limit": options.memory_limit if options.memory_limit != float("inf") else None,
        "peak_of_1f1b": whole,
        "schedules": [
            {name: row.report[name] for name in _REPORTED}
            | {"label": row.label, "memory": row.peak, "memory_of_1f1b": row.peak / whole if whole else None}
            for row in rows
        ],
        "refused": refused,
    }


def _plot(options: argparse.Namespace, rows: list[Row], whole: float | None) -> None:
    rate = "makespan_bubble_rate" if options.objective == "makespan" else "bubble_rate"
    points = [Point(row.label, row.report[rate], row.peak) for row in rows]
    title = f"{options.pp} ranks, {options.microbatches} microbatches, {options.objective}"
    draw_pareto(points, options.output, whole or None, title)


def _print_table(rows: list[Row], refused: dict[str, str], whole: float | None) -> None:
    heads = ["schedule", "span", "bubble", "makespan", "bubble", "memory", "of 1F1B", "above bound", "plan s"]
    cells = [
        [
            row.label,
            f"{row.report['span']:g}",
            f"{row.report['bubble_rate']:.1%}",
            f"{row.report['makespan']:g}",
            f"{row.report['makespan_bubble_rate']:.1%}",
            f"{row.peak:g}",
            f"{row.peak / whole:.2f}" if whole else "-",
            f"{row.gap:.1%}",
            f"{row.planned.seconds:.3f}",
        ]
        for row in rows
    ]
    if sys.stdout.isatty():
        _rich_table(heads, cells)
    else:
        print(plain_table(heads, cells))
    if refused:
        print("\nnot possible here:")
        print("\n".join(f"  {label}: {reason}" for label, reason in refused.items()))


def _rich_table(heads: list[str], cells: list[list[str]]) -> None:
    # Imported here: rich takes longer to import than a small comparison takes to make.
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column, head in enumerate(heads):
        table.add_column(head, justify="right" if column else "left")
    for row in cells:
        table.add_row(*row)
    Console().print(table)
