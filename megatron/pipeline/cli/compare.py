"""``mpipe compare``: every schedule under the same costs and limit, best first."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.pipeline.cli.arguments import (
    Commands,
    add_command,
    boundary_flags,
    cost_flags,
    goal_flags,
    names,
    offload_flags,
    pass_flags,
    report_flags,
    size_flags,
    whole_numbers,
)
from megatron.pipeline.cli.drawn import page
from megatron.pipeline.cli.progress import Progress
from megatron.pipeline.cli.request import cost_flags_of, requested
from megatron.pipeline.cli.summary import above_bound, check_suffix, wrote
from megatron.pipeline.planner import (
    Objective,
    Planned,
    Request,
    choose,
    counted,
    document,
    families,
    peak_of_1f1b,
    refusals,
    variants,
    view,
    written_costs,
)

_SUFFIXES = (".json", ".html", ".png", ".svg", ".pdf")


def add(commands: Commands) -> None:
    report = report_flags(
        "one JSON object: the figures of every schedule, and why the others are not possible",
        ".json for the table, .html for all timelines, .png, .svg or .pdf for a plot of bubble against memory",
    )
    parser = add_command(
        commands,
        "compare",
        "plan all schedules under the same costs and limit, best first",
        run,
        "mpipe compare --pp 8 --microbatches 32 --cost F=1,B=1.2,W=0.8,comm=0.05",
        "mpipe compare --pp 8 --microbatches 32 --schedules 1f1b,zb-h1,zb-v,v-half --memory-limit 5 -o table.html",
        epilog=f"{above_bound('objective').capitalize()}. Of 1F1B: memory, as a multiple of what 1F1B holds. With --offload, "
        "without: memory without copies; host: memory there; moved: the share of all activations that is copied. With parts of "
        "layers in --cost, or --overlap-experts, exposed: the share of all-to-alls that no computation hides.",
        parents=[size_flags(), goal_flags(), cost_flags(), boundary_flags(), pass_flags(), offload_flags(), report],
    )
    parser.add_argument("--schedules", type=names, metavar="A,B,..", help="these only (default: all)")
    tried = "chunks per rank to try, for families that take several numbers (default: all up to 4)"
    parser.add_argument("--chunks", type=whole_numbers, metavar="V,V2", help=tried)


@dataclass(frozen=True)
class Comparison:
    """Schedules that were compared.

    Attributes:
        whole: the most that a rank of 1F1B holds under the same costs; None where its stages do not fit these costs.
    """

    request: Request
    planned: list[Planned]
    refused: list[refusals.Refusal]
    whole: float | None

    @property
    def objective(self) -> Objective:
        return Objective(self.request.objective)


def run(options: argparse.Namespace) -> None:
    suffix = check_suffix(options.output, _SUFFIXES)
    if families.AUTO in (options.schedules or []):
        raise ValueError(
            f"{families.AUTO} is the best of all schedules: leave --schedules out to compare all, or take "
            f"mpipe plan --schedule {families.AUTO}"
        )
    request = requested(options)
    with Progress("planning schedules") as progress:
        planned, refused = choose.candidates(request, variants(options.pp, options.schedules, options.chunks), progress)
    if not planned:
        raise refusals.nothing_fits(refused, request.unit, request.lowest_limit)
    of_1f1b = written_costs.costs_of(cost_flags_of(options), families.placement("1f1b", options.pp))
    compared = Comparison(request, planned, refused, peak_of_1f1b(of_1f1b, options.pp, options.microbatches))
    if suffix == ".json":
        Path(options.output).write_text(json.dumps(_data(compared)) + "\n", encoding="utf-8")
    elif options.json:
        print(json.dumps(_data(compared)))
    else:
        _print_table(compared)
    if suffix == ".html":
        page(options.output, {str(plan.variant): (plan.timeline, plan) for plan in planned})
    elif suffix in (".png", ".svg", ".pdf"):
        _plot(compared, options.output)
    if suffix:
        wrote(options.output)


def _data(compared: Comparison) -> dict[str, Any]:
    request, whole = compared.request, compared.whole
    return {
        "pp": request.ranks,
        "microbatches": request.microbatches,
        "objective": request.objective,
        "memory_limit": request.lowest_limit if request.lowest_limit != float("inf") else None,
        "peak_of_1f1b": whole,
        "schedules": [document.row(plan) | {"memory_of_1f1b": plan.peak / whole if whole else None} for plan in compared.planned],
        "refused": {str(refusal.variant): refusal.reason for refusal in compared.refused},
    }


def _plot(compared: Comparison, path: str) -> None:
    request, objective, unit = compared.request, compared.objective, compared.request.unit
    title = f"{counted(request.ranks, 'rank')}, {counted(request.microbatches, 'microbatch')}"
    points = [
        view.Point(str(plan.variant), objective.bubble_rate(plan.timeline), plan.peak / unit.size) for plan in compared.planned
    ]
    whole = compared.whole / unit.size if compared.whole else None
    view.draw_pareto(points, path, whole, title, unit.name.strip() or "in the costs file's unit", objective)


def _print_table(compared: Comparison) -> None:
    request, whole = compared.request, compared.whole
    memory = f"memory, {request.unit.name}" if request.unit is refusals.MIB else "memory"
    heads = ["schedule", "makespan", "bubble", "span", "bubble", memory, "of 1F1B", "above bound", "plan s"]
    heads[-2:-2] = ["without", "host", "moved"] if request.offload else []
    communicating = any(plan.communication[1] for plan in compared.planned)
    heads[-2:-2] = ["exposed"] if communicating else []
    periods = any(plan.period is not None for plan in compared.planned)
    heads[1:1] = ["period", "by rules", "above its bound"] if periods else []
    cells = [
        [
            str(plan.variant),
            *(_periods(plan) if periods else []),
            f"{plan.timeline.makespan:g}",
            f"{plan.timeline.bubble_rate:.1%}",
            f"{plan.timeline.span:g}",
            f"{plan.timeline.span_bubble_rate:.1%}",
            request.unit.number(plan.peak),
            f"{plan.peak / whole:.2f}" if whole else "-",
            *(_offloaded(plan, request.unit) if request.offload else []),
            *([_exposed(plan)] if communicating else []),
            f"{plan.gap:z.1%}",
            f"{plan.seconds:.3f}",
        ]
        for plan in compared.planned
    ]
    print(view.plain_table(heads, cells))
    print(f"\n{above_bound(compared.objective)}")
    if compared.refused:
        print("\nnot possible here:")
        print("\n".join(f"  {line}" for line in refusals.folded(compared.refused, request.unit, request.lowest_limit)))


def _offloaded(plan: Planned, unit: refusals.Unit) -> tuple[str, str, str]:
    """Memory that a schedule holds without copies, its share in host memory, and which share of all activations goes there."""
    fields = document.gain(plan)
    without, host = (unit.number(max(fields[name])) for name in ("peak_without", "host_peak"))
    return without, host, f"{fmean(fields['moved_share']):.1%}"


def _periods(plan: Planned) -> tuple[str, str, str]:
    """The period, that under Megatron-LM's rules, and how far the former is above its bound."""
    if plan.period is None or plan.by_rules is None:
        return "-", "-", "-"
    return f"{plan.period:g}", f"{plan.by_rules:g}", f"{plan.period_gap:z.1%}"


def _exposed(plan: Planned) -> str:
    """The share of all-to-alls in which a rank computes nothing."""
    exposed, whole = plan.communication
    return f"{exposed / whole:.0%}" if whole else "-"
