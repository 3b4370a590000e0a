"""Timelines as one self-contained HTML page, to zoom into and to point at: it needs no network, no server, no library."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import Need
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.time.simulate import activation_changes, activation_peaks
from megatron.pipeline.planner.view.style import COLOURS, LIGHTEST

WEB = Path(__file__).parent / "web"
_KINDS = list(Kind)


@dataclass(frozen=True)
class Entry:
    """One panel of a page.

    Attributes:
        title: its name, such as that of the schedule.
        timeline: when every pass runs, planned or measured.
        schedule: whose timeline it is; without it, stages and dependencies are not shown.
        costs: the schedule's; without them, memory is not shown.
        facts: what else the table at the top says of it, by column, such as ``{"gap": "0.3%"}``.

    Raises:
        ValueError: the timeline has other passes than the schedule, or costs come without a schedule.
    """

    title: str
    timeline: Timeline
    schedule: Schedule | None = None
    costs: Costs | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schedule is None:
            if self.costs is not None:
                raise ValueError(f"{self.title}: costs say nothing about a timeline without its schedule; give both or neither")
        elif self.schedule.passes != tuple(tuple(timed.work for timed in rank) for rank in self.timeline.ranks):
            raise ValueError(f"{self.title}: the timeline is not one of this schedule; its ranks run other passes")


def write_page(entries: Sequence[Entry], path: str | Path) -> None:
    """Write timelines, one under another on one time axis, as an HTML page.

    The page shows microbatches, chunks, the memory of every rank and the dependencies of each microbatch; 200,000 passes
    take about a megabyte. It works from a file, in browsers from 2023 on.

    Args:
        entries: what to show. Each timeline is shifted to start at 0.
        path: where the page goes.

    Raises:
        ValueError: there is nothing to show, or a microbatch or chunk is numbered beyond what a page can hold.
        OSError: the file cannot be written.
    """
    if not entries:
        raise ValueError("nothing to show: give at least one timeline")
    data = {**looks(), "entries": [encoded(entry) for entry in entries]}
    scripts = (WEB / name for name in ("model.js", "paint.js", "overview.js", "timelines.js", "main.js"))
    parts = {
        "style": _read(WEB / "page.css"),
        "script": "\n".join(map(_read, scripts)),
        # Within a script element, "<" could begin the tag that ends it.
        "data": json.dumps(data).replace("<", "\\u003c"),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda marker: parts[marker[1]], _read(WEB / "page.html"))
    Path(path).write_text(page, encoding="utf-8")


def looks() -> dict[str, Any]:
    """Looks of passes, for the page's scripts: of every kind its name, meaning, colour and row of the table, as far as they draw
    it; and how light the last chunk is."""
    return {
        "kinds": [
            {
                "name": kind,
                "meaning": kind.row.meaning,
                "colour": COLOURS[kind],
                "braided": bool(kind.row.braided),
                "lane": kind.is_copy,
                "needs": [_need(need) for need in kind.row.needs if not need.delay],
            }
            for kind in _KINDS
        ],
        "lightest": LIGHTEST,
    }


def _need(need: Need) -> dict[str, Any]:
    return {"kinds": need.kinds, "where": need.where.name, "on": need.on and need.on.name, "modes": need.modes}


def encoded(entry: Entry) -> dict[str, Any]:
    """An entry as the page's scripts read it, and as JSON takes it.

    Raises:
        ValueError: a microbatch or chunk is numbered beyond what a page can hold.
    """
    changes: list[float] = []
    if entry.schedule is not None and entry.costs is not None:
        changes = [change for rank in activation_changes(entry.schedule, entry.costs) for change in rank]
    placement, copies = entry.schedule.placement if entry.schedule else None, entry.timeline.copies
    return {
        "title": entry.title,
        "facts": _facts(entry),
        **_table(entry.title, entry.timeline.ranks, changes),
        "copies": _table(entry.title, copies) if copies else None,
        "stages": placement.stages if placement else None,
        "splits": entry.schedule.splits if entry.schedule else 1,
        "vocabulary": entry.schedule.vocabulary if entry.schedule else None,
        "memory": bool(changes),
    }


def _table(title: str, ranks: Sequence[Sequence[Timed]], changes: Sequence[float] = ()) -> dict[str, Any]:
    """Number of passes of every rank, and all of them as columns, rank after rank, in one zlib stream that model.js undoes.

    The columns are starts, ends (float64), changes of memory (float64, if known), microbatches (uint32), chunks (uint16)
    and kinds (uint8, an index into the page's kinds), all little-endian and without padding.
    """
    passes = [timed for rank in ranks for timed in rank]
    works = [timed.work for timed in passes]
    if any(work.microbatch >= 1 << 32 or work.chunk >= 1 << 16 for work in works):
        raise ValueError(f"{title}: a page counts microbatches up to {(1 << 32) - 1} and chunks up to {(1 << 16) - 1}")
    columns = (
        ("d", [float(timed.start) for timed in passes]),
        ("d", [float(timed.end) for timed in passes]),
        ("d", [float(change) for change in changes]),
        ("I", [work.microbatch for work in works]),
        ("H", [work.chunk for work in works]),
        ("B", [_KINDS.index(work.kind) for work in works]),
    )
    packed = b"".join(struct.pack(f"<{len(values)}{code}", *values) for code, values in columns)
    return {"counts": [len(rank) for rank in ranks], "columns": base64.b64encode(zlib.compress(packed, level=9)).decode("ascii")}


def _facts(entry: Entry) -> dict[str, str]:
    """Facts of the table about an entry: what follows from its timeline, then what its maker adds."""
    timeline, schedule = entry.timeline, entry.schedule
    facts = {"ranks": str(len(timeline.ranks))}
    if schedule is not None:
        facts["chunks"] = str(schedule.placement.chunks)
        facts["microbatches"] = str(schedule.microbatches)
    facts |= {
        "makespan": f"{float(timeline.makespan):.5g}",
        "bubble": f"{float(timeline.bubble_rate):.1%}",
        "span": f"{float(timeline.span):.5g}",
        "bubble of the span": f"{float(timeline.span_bubble_rate):.1%}",
    }
    if schedule is not None and entry.costs is not None:
        facts["peak memory"] = f"{float(max(activation_peaks(schedule, entry.costs))):.4g}"
        if slow := entry.costs.slow(schedule.placement):
            facts["slow"] = ", ".join(f"{name}: {value:.4g}" for name, value in slow.items())
    return facts | dict(entry.facts)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
