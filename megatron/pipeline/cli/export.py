"""``mpipe export``: a schedule as JSON, as CSV for ``torch.distributed.pipelining``, or as a trace for Perfetto."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron.pipeline.cli.arguments import Commands, add_command, cost_flags
from megatron.pipeline.cli.drawn import trace
from megatron.pipeline.cli.request import changes
from megatron.pipeline.cli.summary import check_suffix, wrote
from megatron.pipeline.planner import document

_SUFFIXES = (".trace.json", ".json", ".csv")


def add(commands: Commands) -> None:
    examples = "mpipe export plan.json -o plan.csv", "mpipe export plan.json -o plan.trace.json"
    help = "write a schedule from a file in another format"
    parser = add_command(commands, "export", help, run, *examples, parents=[cost_flags()])
    formats = ".csv for torch.distributed.pipelining, .trace.json for Perfetto and chrome://tracing, other .json for mpipe"
    parser.flag("file", "what mpipe plan --json wrote, or .csv; for a trace also a recorded timeline", str, metavar="FILE")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help=formats)


def run(options: argparse.Namespace) -> None:
    suffix = check_suffix(options.output, _SUFFIXES)
    if suffix == ".trace.json":
        timeline, planned = document.read_timeline(options.file, changes(options))
        text = trace(planned.title if planned else Path(options.file).stem, timeline, planned)
    elif suffix == ".csv":
        from megatron.pipeline.planner import to_csv

        text = to_csv(document.read(options.file, changes(options)).schedule)
    else:
        planned = document.read(options.file, changes(options))
        text = json.dumps(document.report(planned) | {"slots": planned.slots(posted=True)}) + "\n"
    Path(options.output).write_text(text, encoding="utf-8")
    wrote(options.output)
