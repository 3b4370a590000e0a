"""``mpipe compare``: every schedule under the same costs and limit, best first."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.pipeline.cli.arguments import (
    Commands,
    cost_flags,
    goal_flags,
    names,
    offload_flags,
    pass_flags,
    report_flags,
    size_flags,
    whole_numbers,
)
from megatron.pipeline.cli.draw import page
from megatron.pipeline.cli.request import cost_flags_of, requested
from megatron.pipeline.cli.summary import above_bound, check_suffix, wrote
from megatron.pipeline.planning.choose import candidates, peak_of_1f1b
from megatron.pipeline.planning.costs import costs_of
from megatron.pipeline.planning.document import gain, row
from megatron.pipeline.planning.planned import Planned
from megatron.pipeline.planning.refusals import Refusal, folded, nothing_fits
from megatron.pipeline.planning.request import Request, variants
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.problem import Objective
from megatron.pipeline.schedule.families import AUTO
from megatron.pipeline.schedule.time.jitter import expected
from megatron.pipeline.view import Point, draw_pareto, draw_robustness
from megatron.pipeline.view.table import plain_table

_FRAMED, _PLAIN = (3, 1), (2, -2)  # how wide a table is beside its text: by column, and once
_SUFFIXES = (".json", ".html", ".png", ".svg")


def add(commands: Commands) -> None:
    help = "plan all schedules under the same costs and limit, best first"
    report = report_flags(
        "one JSON object: the figures of every schedule, and why the others are not possible",
        ".json for the table, .html for all timelines, .png or .svg for a plot of bubble against memory, or with --jitter of "
        "the spans under jitter",
    )
    parents = [size_flags(), goal_flags(several=True), cost_flags(), pass_flags(), offload_flags(), report]
    parser = commands.add_parser(
        "compare",
        help=help,
        description=help,
        epilog=f"{above_bound('objective').capitalize()}. Of 1F1B: memory, as a multiple of what 1F1B holds. With --offload, "
        "without: memory where nothing is copied; host: memory there; moved: the share of all activations that goes there.",
        parents=parents,
    )
    parser.add_argument("--schedules", type=names, metavar="A,B,..", help="these only (default: all)")
    parser.add_argument(
        "--chunks",
        type=whole_numbers,
        metavar="V,V2",
        help="chunks per rank to try, for families that take several numbers (default: all up to 4)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    suffix = check_suffix(options.output, _SUFFIXES)
    if AUTO in (options.schedules or []):
        raise ValueError(
            f"{AUTO} is the best of all schedules: leave --schedules out to compare all, or take mpipe plan --schedule {AUTO}"
        )
    request = requested(options)
    planned, refused = candidates(request, variants(options.pp, options.schedules, options.chunks))
    if not planned:
        raise nothing_fits(refused, request.unit, request.limit)
    whole = _peak_of_1f1b(options)
    spans = _under_jitter(planned, options.jitter or [])
    if suffix == ".json" or options.json:
        text = json.dumps(_data(options, planned, refused, whole, spans))
        if suffix == ".json":
            Path(options.output).write_text(text + "\n", encoding="utf-8")
        else:
            print(text)
    else:
        _print_table(request, planned, refused, whole, spans)
    if suffix == ".html":
        page(options.output, {str(plan.variant): (plan.timeline, plan) for plan in planned})
    elif suffix in (".png", ".svg"):
        _plot(options, planned, whole, spans)
    if suffix:
        wrote(options.output)


def _under_jitter(planned: list[Planned], jitters: list[float]) -> dict[str, dict[float, list[float]]]:
    """By schedule and by jitter, the span of every draw, or the makespan if that is the objective."""
    spans: dict[str, dict[float, list[float]]] = {}
    for plan in planned:
        by_jitter = spans[str(plan.variant)] = {}
        for jitter in jitters:
            found = plan.expected if jitter == plan.problem.jitter else None
            found = found or expected(plan.schedule, plan.problem.costs, jitter, draws=100 if jitter else 1)
            by_jitter[jitter] = (found.spans if plan.problem.objective is Objective.SPAN else found.makespans).tolist()
    return spans


def _peak_of_1f1b(options: argparse.Namespace) -> float | None:
    """The most that a rank of 1F1B holds under the same costs, where the model can be cut into one stage per rank."""
    if options.costs and len(options.costs.stages) % options.pp:
        return None
    costs = options.costs or costs_of(cost_flags_of(options), families.placement("1f1b", options.pp))
    return peak_of_1f1b(options.pp, options.microbatches, costs)


def _data(
    options: argparse.Namespace,
    planned: list[Planned],
    refused: list[Refusal],
    whole: float | None,
    spans: dict[str, dict[float, list[float]]],
) -> dict[str, Any]:
    rows = []
    for plan in planned:
        told = row(plan) | {"memory_of_1f1b": plan.peak / whole if whole else None}
        if options.jitter:
            means = {f"{jitter:g}": fmean(values) for jitter, values in spans[told["label"]].items()}
            told[f"expected_{plan.problem.objective}_by_jitter"] = means
        rows.append(told)
    return {
        "pp": options.pp,
        "microbatches": options.microbatches,
        "objective": options.objective,
        "memory_limit": options.memory_limit if options.memory_limit != float("inf") else None,
        "peak_of_1f1b": whole,
        "schedules": rows,
        "refused": {str(refusal.variant): refusal.reason for refusal in refused},
    }


def _plot(
    options: argparse.Namespace, planned: list[Planned], whole: float | None, spans: dict[str, dict[float, list[float]]]
) -> None:
    objective = Objective(options.objective)
    title = f"{options.pp} ranks, {options.microbatches} microbatches"
    if options.jitter:
        draw_robustness(spans, options.output, title=title, measured=objective)
        return
    points = [Point(str(plan.variant), objective.bubble_rate(plan.timeline), plan.peak) for plan in planned]
    unit = "in the costs file's unit" if options.costs else "microbatches"
    draw_pareto(points, options.output, whole or None, f"{title}, {objective}", unit)


def _print_table(
    request: Request,
    planned: list[Planned],
    refused: list[Refusal],
    whole: float | None,
    spans: dict[str, dict[float, list[float]]],
) -> None:
    jitters = list(next(iter(spans.values())))
    heads = ["schedule", "makespan", "bubble", "span", "bubble", "memory", "of 1F1B", "above bound", "plan s"]
    offloads = any(plan.problem.offload for plan in planned)
    heads[-2:-2] = ["without", "host", "moved"] if offloads else []
    heads[1:1] = [f"jitter {jitter:.0%}" for jitter in jitters]
    cells = []
    for plan in planned:
        timeline, label = plan.timeline, str(plan.variant)
        cells.append(
            [
                label,
                *(f"{fmean(spans[label][jitter]):g}" for jitter in jitters),
                f"{timeline.makespan:g}",
                f"{timeline.makespan_bubble_rate:.1%}",
                f"{timeline.span:g}",
                f"{timeline.bubble_rate:.1%}",
                f"{plan.peak:g}",
                f"{plan.peak / whole:.2f}" if whole else "-",
                *(_offloaded(plan) if offloads else []),
                f"{plan.gap:z.1%}",
                f"{plan.seconds:.3f}",
            ]
        )
    if sys.stdout.isatty():
        _rich_table(heads, cells)
    else:
        print(plain_table(heads, cells))
    print(f"\n{above_bound(str(request.objective))}")
    if refused:
        print("\nnot possible here:")
        print("\n".join(f"  {line}" for line in folded(refused, request.unit, request.limit)))


def _offloaded(plan: Planned) -> tuple[str, str, str]:
    """What a schedule holds without copies, what it has in host memory, and which share of all activations goes there."""
    told = gain(plan)
    return f"{max(told['peak_without']):g}", f"{max(told['host_peak']):g}", f"{fmean(told['moved_share']):.1%}"


def _rich_table(heads: list[str], cells: list[list[str]]) -> None:
    # Imported here: rich takes longer to import than a small comparison takes to make.
    from rich.console import Console
    from rich.table import Table

    console = Console()

    def is_wide(by_column: int, once: int) -> bool:
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        return sum(widths) + by_column * len(widths) + once > console.width

    for head, kind in (("plan s", _FRAMED), ("of 1F1B", _PLAIN)):  # a narrow terminal does without
        if is_wide(*kind):
            at = heads.index(head)
            heads, cells = [*heads[:at], *heads[at + 1 :]], [[*line[:at], *line[at + 1 :]] for line in cells]
    if is_wide(*_FRAMED):
        print(plain_table(heads, cells))
        return
    table = Table()
    for column, head in enumerate(heads):
        table.add_column(head, justify="right" if column else "left")
    for line in cells:
        table.add_row(*line)
    console.print(table)
