"""``mpipe draw``: schedules (simulated) and recorded timelines from files, as a picture or as text."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from megatron.pipeline.cli.arguments import Commands, add_command, cost_flags
from megatron.pipeline.cli.request import changes
from megatron.pipeline.cli.summary import check_suffix, drawing, wrote
from megatron.pipeline.planning.document import curves, is_schedule, naming, read_recorded_plan, read_timeline
from megatron.pipeline.planning.planned import Planned
from megatron.pipeline.schedule.core.timeline import Timeline
from megatron.pipeline.view import Consecutive, Entry, RecordedIteration, draw, write_page

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
    if options.consecutive:
        _join(options)
        return
    suffix = check_suffix(options.output, _SUFFIXES)
    if options.memory and not options.output:
        raise ValueError("--memory is for pictures: add -o FILE.png, .svg or .html, or leave it out")
    shown: dict[str, tuple[Timeline, Planned | None]] = {}
    for path in options.files:
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


def _join(options: argparse.Namespace) -> None:
    """Draw iterations that follow one another in one panel."""
    check_suffix(options.output, (".png", ".svg"))
    if options.memory:
        raise ValueError("--memory is for schedules, and --consecutive joins recorded iterations: leave one of them out")
    joined = Consecutive(tuple(_read_iteration(path) for path in options.files))
    title, timeline = joined.title, joined.timeline
    if options.output:
        draw({title: timeline}, options.output, unit="s", consecutive={title: joined})
        wrote(options.output)
    else:
        print(f"{title}: {joined.summary()}; every second one in small letters\n{drawing(timeline, consecutive=joined)}")


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


def _read_iteration(path: str) -> RecordedIteration:
    """Read the record of one iteration of a training.

    Raises:
        ValueError: the file cannot be read, is malformed, or a schedule; the message names the file.
    """
    if is_schedule(path):
        raise ValueError(
            f"{path} is a schedule, and only iterations that ran are joined: name the iteration_*.json of --pipeline-trace"
        )
    return naming(path, RecordedIteration.from_json)
