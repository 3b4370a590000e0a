"""``mpipe plan``: the schedule of a family, or the best of all, and how good it is."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.pipeline.cli.arguments import (
    Commands,
    Parser,
    add_command,
    cost_flags,
    goal_flags,
    offload_flags,
    pass_flags,
    report_flags,
    seconds,
    size_flags,
)
from megatron.pipeline.cli.progress import Progress
from megatron.pipeline.cli.request import requested
from megatron.pipeline.cli.summary import above_bound, check_output, put
from megatron.pipeline.flags.flag_types import positive_int
from megatron.pipeline.planning.choose import best
from megatron.pipeline.planning.document import choice_fields, report
from megatron.pipeline.planning.planned import Planned, above
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.optimum.exact import optimum


def add(commands: Commands) -> None:
    family = Parser(add_help=False)
    family.add_argument(
        "--schedule",
        required=True,
        metavar="NAME",
        help=f"{', '.join(families.FAMILIES)}; or auto: plan all and take the shortest, within 0.1 %% of it "
        "the one with the least memory",
    )
    bounds = (
        "The lower bound holds for every order of F, B, W or BW on the same placement within the memory of the schedule's "
        "fullest rank. For 1f1b, interleaved, 1f1b-v, seq-1f1b and chimera, which fuse every backward, the distance shows what "
        "splitting could gain."
    )
    parser = add_command(
        commands,
        "plan",
        "make the schedule of a family, or the best of all",
        run,
        "mpipe plan --schedule zb-v --pp 8 --microbatches 32 --cost F=1,B=1.2,W=0.8,comm=0.05",
        "mpipe plan --schedule auto --pp 8 --microbatches 32 --memory-limit 5 -o plan.json",
        epilog=bounds,
        parents=[family, size_flags(), goal_flags(), cost_flags(), pass_flags(), offload_flags(), report_flags()],
    )
    parser.add_argument("--chunks", type=positive_int, metavar="V", help="model chunks per rank (default: the family's)")
    parser.add_argument("--splits", type=positive_int, metavar="S", help="slices along the sequence per microbatch, for seq-1f1b")
    parser.add_argument("--group", type=positive_int, metavar="G", help="microbatches a chunk runs in turn, for gis and gis-h")
    parser.add_argument(
        "--exact",
        nargs="?",
        type=seconds,
        const=60.0,
        metavar="SECONDS",
        help="also search for the optimum for this time (default 60 s), and print the distance from it; small instances only",
    )


def run(options: argparse.Namespace) -> None:
    check_output(options, drawn=True)
    request = requested(options)
    with Progress("planning schedules") as progress:
        planned, choice = best(request, progress=progress)
    data = report(planned)
    table = ""
    if choice:
        data |= choice_fields(choice)
        table = f"{choice.table(request.unit, request.lowest_limit)}\n\n{above_bound(options.objective)}\n\n"
    if options.exact is not None:
        data["exact"] = _exact(planned, options.exact)
    put(data, planned.timeline, options, table)


def _exact(planned: Planned, seconds: float) -> dict[str, Any]:
    """The field ``exact``: the optimum, or the best schedule and the best bound after that number of seconds.

    Raises:
        ValueError: the schedule has passes that the search does not know.
    """
    problem = planned.problem
    for flag, given in (("--vocab-parallel", problem.vocabulary), ("--offload", problem.offload)):
        if given:
            raise ValueError(f"--exact searches the passes of stages only: leave it out, or {flag}")
    solution = optimum(problem, seconds=seconds, hint=planned.schedule)
    gap = above(problem.value(planned.timeline), solution.bound)
    return {"value": solution.value, "bound": solution.bound, "proven": solution.proven, "gap": gap}
