"""Drawings of schedules and recorded timelines, which ``mpipe plan`` writes: as text, as a picture, as a page, or as a trace."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from megatron.pipeline.cli.arguments import Parser
from megatron.pipeline.cli.request import changes
from megatron.pipeline.cli.summary import check_suffix, drawing, said_slow, wrote
from megatron.pipeline.planner import Planned, Timeline, document, view

Shown: TypeAlias = Mapping[str, tuple[Timeline, Planned | None]]  # by title; a recorded timeline has no schedule

_PICTURES = (".png", ".svg", ".pdf", ".html")


def draw_flags() -> Parser:
    """Flags for what is drawn, and where."""
    flags = Parser(add_help=False)
    flags.add_argument("--text", action="store_true", help="draw as text alone, without the table")
    flags.add_argument("--draw", metavar="OUT", help="also write a picture, .png, .svg or .pdf, or a page to zoom into, .html")
    flags.add_argument("--memory", action="store_true", help="with --draw: activation memory under each schedule of a picture")
    flags.flag("--consecutive", "join iterations of one training run, its iteration_*.json in their order")
    flags.add_argument("--trace", metavar="OUT", help="also write a .trace.json for Perfetto and chrome://tracing")
    return flags


def check_drawn(options: argparse.Namespace) -> None:
    """Refuse wrong ``draw_flags`` before any work is done.

    Raises:
        ValueError: a file is named as if it were something else, or flags do not go together.
    """
    check_suffix(options.draw, _PICTURES)
    check_suffix(options.trace, (".trace.json",))
    if options.memory and not options.draw:
        raise ValueError("--memory is for pictures: add --draw OUT.png, .svg, .pdf or .html, or leave it out")
    if options.text and options.json:
        raise ValueError("--text and --json say two ways to print: leave one of them out")
    if options.consecutive and not options.files:
        raise ValueError("--consecutive joins what a training has recorded: name its iteration_*.json, or leave it out")
    if options.trace and len(options.files) > 1 and not options.consecutive:
        raise ValueError("--trace is of one schedule or timeline: name one FILE, or leave --trace out")


def shown_of(options: argparse.Namespace) -> Shown:
    """Timelines that files hold, with the changes that flags ask for in schedules."""
    if options.consecutive:
        title, timeline = view.joined([document.naming(path, view.recorded) for path in options.files])
        return {title: (timeline, None)}
    shown: dict[str, tuple[Timeline, Planned | None]] = {}
    for path in options.files:
        timeline, planned = document.read_timeline(path, changes(options))
        title = planned.title if planned else Path(path).stem
        title = f"{title} ({path})" if title in shown else title
        if (plan := document.read_recorded_plan(path)) is not None:
            shown[f"{title}, planned"] = plan, None
        shown[title] = timeline, planned
    return shown


def as_text(shown: Shown) -> str:
    """Timelines as text, each under its title; of several also how long each is."""
    texts = []
    for title, (timeline, planned) in shown.items():
        said = f"{title}: makespan {timeline.makespan:g}" if len(shown) > 1 else title
        said += f"\nslow: {said_slow(planned.slow)}" if planned and planned.slow else ""
        texts.append(f"{said}\n{drawing(timeline, planned.schedule.splits if planned else 1)}")
    return "\n\n".join(texts)


def write_drawn(shown: Shown, options: argparse.Namespace) -> None:
    """Write what ``--draw`` and ``--trace`` ask for."""
    if options.draw:
        if Path(options.draw).suffix == ".html":
            page(options.draw, shown)
        else:
            timelines = {title: timeline for title, (timeline, _) in shown.items()}
            schedules = {title: planned for title, (_, planned) in shown.items() if planned}
            splits = {title: planned.schedule.splits for title, planned in schedules.items()}
            slow = {title: planned.slow for title, planned in schedules.items()}
            curves = document.curves(schedules) if options.memory else {}
            view.draw(timelines, options.draw, splits=splits, slow=slow, **curves)
    if options.trace:
        title, (timeline, planned) = list(shown.items())[-1]  # a recorded iteration comes behind its plan
        Path(options.trace).write_text(trace(title, timeline, planned), encoding="utf-8")


def say_drawn(options: argparse.Namespace) -> None:
    """Say which pictures and traces are there now, unless JSON is printed."""
    for path in filter(None, (options.draw, options.trace)):
        if options.output or not options.json:
            wrote(path)


def page(path: str, shown: Shown) -> None:
    """Write an HTML page of timelines by title, with stages and memory where it is of one iteration of a known schedule."""
    entries = []
    for title, (timeline, planned) in shown.items():
        facts = {f"above bound ({planned.problem.objective})": f"{planned.gap:z.1%}"} if planned else {}
        entries.append(view.Entry(title, timeline, **_whole(timeline, planned), facts=facts))
    view.write_page(entries, path)


def trace(title: str, timeline: Timeline, planned: Planned | None) -> str:
    """Text of a timeline's trace for Perfetto, with its schedule where it is known."""
    return json.dumps(view.to_trace(timeline, **(_whole(timeline, planned) or {"name": title})))


def _whole(timeline: Timeline, planned: Planned | None) -> dict[str, Any]:
    """Schedule and costs of which a timeline is one iteration: not two, as of steady training, nor a recorded one."""
    if planned is None or timeline is not planned.timeline:
        return {}
    return {"schedule": planned.schedule, "costs": planned.problem.costs}
