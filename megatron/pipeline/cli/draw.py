"""``mpipe draw``: schedules (simulated) and recorded timelines from files, as a picture or as text."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from megatron.pipeline.cli.arguments import Commands, add_command, cost_flags
from megatron.pipeline.cli.request import changes
from megatron.pipeline.cli.summary import check_suffix, drawing, wrote
from megatron.pipeline.planner.planning.document import curves, naming, read_recorded_plan, read_timeline
from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.view import Entry, draw, write_page
from megatron.pipeline.planner.view.consecutive import joined, recorded

_SUFFIXES = (".png", ".svg", ".html")


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "draw",
        "draw schedules and recorded timelines on one time axis",
        run,
        "mpipe draw plan.json other.json --memory -o both.png",
        "mpipe draw trace/iteration_0000005.json trace/iteration_0000006.json --consecutive",
        parents=[cost_flags()],
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="schedules (mpipe plan --json, or .csv) or recorded timelines")
    parser.add_argument("--memory", action="store_true", help="draw activation memory under each schedule of a picture")
    parser.add_argument(
        "--consecutive", action="store_true", help="join iterations of one training run, its iteration_*.json in their order"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="a .png, .svg or .html file instead of text")


def run(options: argparse.Namespace) -> None:
    suffix = check_suffix(options.output, _SUFFIXES)
    if options.memory and not options.output:
        raise ValueError("--memory is for pictures: add -o FILE.png, .svg or .html, or leave it out")
    shown: dict[str, tuple[Timeline, Planned | None]] = {}
    if options.consecutive:
        title, timeline = joined([naming(path, recorded) for path in options.files])
        shown[title] = timeline, None
    for path in [] if options.consecutive else options.files:
        timeline, planned = read_timeline(path, changes(options))
        title = planned.title if planned else Path(path).stem
        title = f"{title} ({path})" if title in shown else title
        if (plan := read_recorded_plan(path)) is not None:
            shown[f"{title}, planned"] = plan, None
        shown[title] = timeline, planned
    if suffix == ".html":
        page(options.output, shown)
        wrote(options.output)
        return
    timelines = {title: timeline for title, (timeline, _) in shown.items()}
    schedules = {title: planned for title, (_, planned) in shown.items() if planned}
    splits = {title: planned.schedule.splits for title, planned in schedules.items()}
    if suffix:
        draw(timelines, options.output, splits=splits, **(curves(schedules) if options.memory else {}))
        wrote(options.output)
    else:
        print("\n\n".join(f"{title}\n{drawing(timeline, splits.get(title, 1))}" for title, timeline in timelines.items()))


def page(path: str, shown: Mapping[str, tuple[Timeline, Planned | None]]) -> None:
    """Write an HTML page of timelines by title, with stages, memory and gap where the schedule is known."""
    entries = []
    for title, (timeline, planned) in shown.items():
        if planned is None:
            entries.append(Entry(title, timeline))
        else:
            facts = {f"above bound ({planned.problem.objective})": f"{planned.gap:z.1%}"}
            entries.append(Entry(title, timeline, planned.schedule, planned.problem.costs, facts))
    write_page(entries, path)
