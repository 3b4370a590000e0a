"""``mpipe simulate``: how good a schedule from a file is."""

from __future__ import annotations

import argparse

from megatron.pipeline.cli.arguments import (
    Commands,
    add_command,
    boundary_flags,
    cost_flags,
    goal_flags,
    offload_flags,
    report_flags,
)
from megatron.pipeline.cli.request import changes
from megatron.pipeline.cli.summary import check_output, put
from megatron.pipeline.planner.planning.document import read, report


def add(commands: Commands) -> None:
    examples = "mpipe simulate plan.json", "mpipe simulate plan.json --cost F=1,B=1.5,W=0.5,comm=0.1"
    parents = [cost_flags(), boundary_flags(), goal_flags(default=None), offload_flags(), report_flags()]
    parser = add_command(commands, "simulate", "run a schedule from a file against costs", run, *examples, parents=parents)
    parser.add_argument("file", metavar="FILE", help="what mpipe plan --json wrote, or .csv")


def run(options: argparse.Namespace) -> None:
    """Say how good a schedule is, with the costs it was planned with or with others, offloaded or not."""
    check_output(options, drawn=True)
    planned = read(options.file, changes(options))
    put(report(planned), planned.timeline, options)
