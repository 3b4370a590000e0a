"""``mpipe plan``: the schedule of a family, or the best of all, and how good it is."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from megatron.pipeline.cli.arguments import (
    Commands,
    Parser,
    cost_flags,
    goal_flags,
    offload_flags,
    pass_flags,
    report_flags,
    seconds,
    size_flags,
)
from megatron.pipeline.cli.case import Case, gap
from megatron.pipeline.cli.offload import wanted
from megatron.pipeline.cli.refusals import nothing_fits, reason
from megatron.pipeline.cli.request import case_of, plan_all, plan_one, row
from megatron.pipeline.cli.summary import above_bound, check_output, put
from megatron.pipeline.flags.flag_types import positive_int
from megatron.pipeline.planning.choose import AUTO, Candidate, Choice, Refusal, Variant, choose, variants
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.optimum.exact import optimum
from megatron.pipeline.view.table import choice_table


def add(commands: Commands) -> None:
    help = "make the schedule of a family, or the best of all"
    family = Parser(add_help=False)
    family.add_argument(
        "--schedule",
        required=True,
        metavar="NAME",
        help=f"{', '.join(families.FAMILIES)}; or {AUTO}: plan all of them and take the shortest, of those within 0.1 %% of it "
        "the one that holds least",
    )
    bounds = (
        "The lower bound is that of every order of F, B, W or BW on the same placement that holds no more memory on a rank than "
        "the schedule does on its fullest. For 1f1b, interleaved, 1f1b-v, seq-1f1b and chimera, whose backward is always BW, it "
        "says what they lose by that."
    )
    parents = [family, size_flags(), goal_flags(), cost_flags(), pass_flags(), offload_flags(), report_flags()]
    parser = commands.add_parser("plan", help=help, description=help, epilog=bounds, parents=parents)
    parser.add_argument("--chunks", type=positive_int, metavar="V", help="model chunks per rank (default: the family's)")
    parser.add_argument("--splits", type=positive_int, metavar="S", help="slices along the sequence per microbatch, for seq-1f1b")
    parser.add_argument("--group", type=positive_int, metavar="G", help="microbatches a chunk runs in turn, for gis and gis-h")
    parser.add_argument(
        "--exact",
        nargs="?",
        type=seconds,
        const=60.0,
        metavar="SECONDS",
        help="search for the optimum too, for so long (default 60), and say how far it is; small instances only",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_output(options)
    case, data, table = plan(options)
    put(data, case.timeline, options, table)


def plan(options: argparse.Namespace) -> tuple[Case, dict[str, Any], str]:
    """The schedule that the flags ask for, what ``--json`` says of it, and a table of what else was tried, if anything was.

    Raises:
        ValueError: the flags do not fit each other, or there is no such schedule.
    """
    name = options.schedule
    if name.startswith("file:"):
        path = name.removeprefix("file:")
        raise ValueError(f"mpipe plan makes the schedules of families; for a file: mpipe simulate {path}, mpipe verify {path}")
    told: dict[str, Any] = {}
    table = ""
    if name == AUTO:
        choice, planned, refused = _choose(options)
        best = choice.best
        told["candidates"] = _rows(choice, planned, refused)
        table = f"{choice_table(choice, planned, refused, partial(reason, options))}\n\n{above_bound(options.objective)}\n\n"
    else:
        best = plan_one(options, Variant(name, options.chunks, options.group, options.splits))
    if options.exact is not None and best.problem.vocabulary:
        raise ValueError("--exact searches the passes of stages only: leave it out, or --vocab-parallel")
    if options.exact is not None and wanted(options):
        raise ValueError("--exact searches the passes of stages only: leave it out, or --offload")
    case = case_of(best)
    data = case.report(best.seconds) | told
    if options.exact is not None:
        found = optimum(case.problem, seconds=options.exact, hint=case.schedule)
        value = data[str(case.problem.objective)]
        data["exact"] = {"value": found.value, "bound": found.bound, "proven": found.proven, "gap": gap(value, found.bound)}
    return case, data, table


def _choose(options: argparse.Namespace) -> tuple[Choice, list[Candidate], list[Refusal]]:
    """Plan everything, and take the best.

    Raises:
        ValueError: no schedule fits, or a flag is for one family only.
    """
    for flag in ("group", "splits"):
        if getattr(options, flag) is not None:
            raise ValueError(f"--{flag} is for single families: leave it out with --schedule {AUTO}, which tries several")
    tried = variants(options.pp, chunks=None if options.chunks is None else [options.chunks])
    planned, refused = plan_all(options, tried)
    if not planned:
        raise nothing_fits(options, refused)
    return choose(planned), planned, refused


def _rows(choice: Choice, planned: list[Candidate], refused: list[Refusal]) -> list[dict[str, Any]]:
    """All candidates for the JSON: those that were planned, then those that could not be."""
    rows = [row(candidate) | {"why_not": choice.why_not.get(candidate.variant)} for candidate in planned]
    missing = [
        {"schedule": refusal.variant.name, "label": str(refusal.variant), "why_not": refusal.reason} for refusal in refused
    ]
    return rows + missing
