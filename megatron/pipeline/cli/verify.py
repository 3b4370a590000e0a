"""``mpipe verify``: whether a schedule from a file is one."""

from __future__ import annotations

import argparse

from megatron.pipeline.cli.arguments import Commands, add_command, cost_flags
from megatron.pipeline.cli.request import changes
from megatron.pipeline.planner.planning.document import read
from megatron.pipeline.planner.schedule.core.names import counted
from megatron.pipeline.planner.schedule.lower.program import Send
from megatron.pipeline.planner.schedule.rules.verify import verify_programs


def add(commands: Commands) -> None:
    examples = "mpipe verify plan.json", "mpipe verify torch.csv --memory-limit 5"
    help = "check a schedule from a file against every rule"
    parser = add_command(commands, "verify", help, run, *examples, parents=[cost_flags()])
    parser.add_argument("file", metavar="FILE", help="what mpipe plan --json wrote, or .csv")


def run(options: argparse.Namespace) -> None:
    """Tell whether a schedule obeys every rule, and its programs cannot deadlock."""
    planned = read(options.file, changes(options))
    schedule = planned.schedule
    verify_programs(schedule, planned.programs)
    sends = sum(isinstance(operation, Send) for program in planned.programs for operation in program)
    shape = f"{counted(schedule.ranks, 'rank')}, {counted(schedule.microbatches, 'microbatch')}"
    count = f"{sum(map(len, schedule.passes))} passes and {sends} sends"
    print(f"{options.file}: {schedule.name} ({shape}) obeys every rule; {count}, no deadlock")
