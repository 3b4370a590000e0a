"""``mpipe simulate`` and ``mpipe verify``: how good a schedule from a file is, and whether it is one."""

from __future__ import annotations

import argparse

from megatron.pipeline.cli.arguments import Commands, cost_flags, goal_flags, offload_flags, report_flags
from megatron.pipeline.cli.request import changes
from megatron.pipeline.cli.summary import check_output, put
from megatron.pipeline.planning.document import read, report
from megatron.pipeline.schedule.core.names import counted
from megatron.pipeline.schedule.lower.program import Send
from megatron.pipeline.schedule.rules.verify import verify_programs


def add(commands: Commands) -> None:
    help = "run a schedule from a file against costs"
    simulator = commands.add_parser(
        "simulate",
        help=help,
        description=help,
        parents=[cost_flags(), goal_flags(default=None), offload_flags(), report_flags()],
        examples=[
            "mpipe simulate plan.json",
            "mpipe simulate plan.json --cost F=1,B=1.5,W=0.5,comm=0.1 --jitter 0.1",
        ],
    )
    simulator.set_defaults(run=simulate_file)
    help = "check a schedule from a file against every rule"
    verifier = commands.add_parser(
        "verify",
        help=help,
        description=help,
        parents=[cost_flags()],
        examples=[
            "mpipe verify plan.json",
            "mpipe verify torch.csv --memory-limit 5",
        ],
    )
    verifier.set_defaults(run=verify_file)
    for parser in (simulator, verifier):
        parser.add_argument("file", metavar="FILE", help="what mpipe plan --json wrote, or .csv")


def simulate_file(options: argparse.Namespace) -> None:
    """How good a schedule is, with the costs it was planned with or with others, offloaded or not."""
    check_output(options, drawn=True)
    planned = read(options.file, changes(options))
    put(report(planned), planned.timeline, options)


def verify_file(options: argparse.Namespace) -> None:
    """Whether a schedule obeys every rule, and its programs cannot deadlock."""
    planned = read(options.file, changes(options))
    schedule = planned.schedule
    verify_programs(schedule, planned.programs)
    sends = sum(isinstance(operation, Send) for program in planned.programs for operation in program)
    shape = f"{counted(schedule.ranks, 'rank')}, {counted(schedule.microbatches, 'microbatch')}"
    count = f"{sum(map(len, schedule.passes))} passes and {sends} sends"
    print(f"{options.file}: {schedule.name} ({shape}) obeys every rule; {count}, no deadlock")
