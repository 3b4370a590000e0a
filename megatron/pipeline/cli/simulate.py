"""``mpipe simulate`` and ``mpipe verify``: how good a schedule from a file is, and whether it is one."""

from __future__ import annotations

import argparse

from megatron.pipeline.cli.arguments import Commands, cost_flags, goal_flags, offload_flags, report_flags
from megatron.pipeline.cli.case import read_case
from megatron.pipeline.cli.summary import check_output, put
from megatron.pipeline.schedule.lower.lower import lower
from megatron.pipeline.schedule.lower.program import Send
from megatron.pipeline.schedule.rules.verify import verify_programs


def add(commands: Commands) -> None:
    help = "run a schedule from a file against costs"
    simulator = commands.add_parser(
        "simulate", help=help, description=help, parents=[cost_flags(), goal_flags(default=None), offload_flags(), report_flags()]
    )
    simulator.set_defaults(run=simulate_file)
    help = "check a schedule from a file against every rule"
    verifier = commands.add_parser("verify", help=help, description=help, parents=[cost_flags()])
    verifier.set_defaults(run=verify_file)
    for parser in (simulator, verifier):
        parser.add_argument("file", metavar="FILE", help="what mpipe plan --json wrote, or .csv")


def simulate_file(options: argparse.Namespace) -> None:
    """How good a schedule is, with the costs it was planned with or with others, offloaded or not."""
    check_output(options)
    case = read_case(options.file, options)
    put(case.report(), case.timeline, options)


def verify_file(options: argparse.Namespace) -> None:
    """Whether a schedule obeys every rule, and its programs cannot deadlock."""
    case = read_case(options.file, options)
    schedule = case.schedule
    programs = lower(schedule, case.problem.costs)
    verify_programs(schedule, programs)
    sends = sum(isinstance(operation, Send) for program in programs for operation in program)
    shape = f"{schedule.ranks} ranks, {schedule.microbatches} microbatches"
    count = f"{sum(map(len, schedule.passes))} passes and {sends} sends"
    print(f"{options.file}: {schedule.name} ({shape}) obeys every rule; {count}, no deadlock")
