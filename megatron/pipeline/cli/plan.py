"""``mpipe plan``: the schedule of a family, or the best of all, and how good it is."""

from __future__ import annotations

import argparse

from megatron.pipeline.cli.arguments import (
    Commands,
    Parser,
    add_command,
    boundary_flags,
    cost_flags,
    goal_flags,
    length_flags,
    offload_flags,
    pass_flags,
    report_flags,
    size_flags,
)
from megatron.pipeline.cli.progress import Progress
from megatron.pipeline.cli.request import requested
from megatron.pipeline.cli.summary import above_bound, check_output, put
from megatron.pipeline.flags.flag_types import positive_int
from megatron.pipeline.planner.planning.choose import best
from megatron.pipeline.planner.planning.document import choice_fields, report
from megatron.pipeline.planner.planning.every_batch import batch_fields, ordered
from megatron.pipeline.planner.schedule import families


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
        "fullest rank. For 1f1b, interleaved, 1f1b-v and seq-1f1b, which fuse every backward, the distance shows what "
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
        parents=[
            *(family, size_flags(), length_flags(), goal_flags(), cost_flags(), boundary_flags(), pass_flags(), offload_flags()),
            report_flags(),
        ],
    )
    parser.add_argument("--chunks", type=positive_int, metavar="V", help="model chunks per rank (default: the family's)")
    parser.add_argument("--splits", type=positive_int, metavar="S", help="slices along the sequence per microbatch, for seq-1f1b")
    parser.add_argument("--group", type=positive_int, metavar="G", help="microbatches a chunk runs in turn, for interleaved, gis")


def run(options: argparse.Namespace) -> None:
    check_output(options, drawn=True)
    request = requested(options)
    with Progress("planning schedules") as progress:
        planned, choice = best(request, progress=progress)
        if options.order == "any":
            planned = ordered(request.of(planned.variant))
    data = report(planned)
    if options.lengths:
        data |= batch_fields(planned, request.of(planned.variant))
    table = ""
    if choice:
        data |= choice_fields(choice)
        table = f"{choice.table(request.unit, request.lowest_limit)}\n\n{above_bound(options.objective)}\n\n"
    put(data, planned.timeline, options, table)
