"""``mpipe draw``: schedules (simulated) and recorded timelines from files, as a picture or as text."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.pipeline.cli.arguments import Commands, cost_flags, read_text
from megatron.pipeline.cli.case import Case, is_table, naming, read_case
from megatron.pipeline.cli.summary import drawing
from megatron.pipeline.schedule.simulate import activation_profile
from megatron.pipeline.schedule.timeline import Timeline
from megatron.pipeline.view import draw


def add(commands: Commands) -> None:
    help = "draw schedules and recorded timelines on one time axis"
    parser = commands.add_parser("draw", help=help, description=help, parents=[cost_flags()])
    parser.add_argument("files", nargs="+", metavar="FILE", help="schedules (mpipe plan --json, or .csv) or recorded timelines")
    parser.add_argument("--memory", action="store_true", help="draw activation memory under each schedule of a picture")
    parser.add_argument("-o", "--output", metavar="FILE", help="a .png or .svg file instead of text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    if options.memory and not options.output:
        raise ValueError("--memory is for pictures: add -o FILE.png or -o FILE.svg, or leave it out")
    timelines: dict[str, Timeline] = {}
    cases: dict[str, Case] = {}
    for path in options.files:
        if is_table(path) or '"passes"' in read_text(path):
            case = read_case(path, options)
            name = case.schedule.name
            title = name if name not in timelines else f"{name} ({path})"
            cases[title], timelines[title] = case, case.timeline()
        else:
            title = Path(path).stem if Path(path).stem not in timelines else path
            timelines[title] = naming(path, Timeline.from_json)
    if options.output:
        memory = {title: activation_profile(case.schedule, timelines[title], case.costs) for title, case in cases.items()}
        draw(timelines, options.output, memory if options.memory else None)
    else:
        print("\n\n".join(f"{title}\n{drawing(timeline)}" for title, timeline in timelines.items()))
