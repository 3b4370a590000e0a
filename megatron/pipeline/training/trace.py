"""Measured timelines on disk: ``DIR/iteration_0000020.json`` for every logged iteration, and a picture of the last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.pipeline.schedule.timeline import Timeline
from megatron.pipeline.training.atomic import write_text
from megatron.pipeline.view.picture import draw

if TYPE_CHECKING:
    from megatron.pipeline.runtime.pipeline import Pipeline, Report


def write_trace(directory: str, iteration: int, pipeline: Pipeline, report: Report) -> None:
    """Write the timeline of one iteration."""
    record = {
        "schedule": pipeline.name,
        "iteration": iteration,
        "placement": pipeline.placement.stages,
        "timeline": json.loads(report.timeline.to_json()),
    }
    write_text(Path(directory) / f"iteration_{iteration:07d}.json", json.dumps(record))


def read_last_trace(directory: str) -> tuple[dict[str, Any], Timeline] | None:
    """The record of the last iteration that was written, and its timeline; None if there is none."""
    # By time, not by name: an earlier run into the same directory may have gone further.
    paths = sorted(Path(directory).glob("iteration_*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    if not paths:
        return None
    text = paths[-1].read_text()
    return json.loads(text), Timeline.from_json(text)


def draw_last_trace(directory: str) -> Path | None:
    """Draw the iteration that was written last, beside it; returns the picture's path."""
    trace = read_last_trace(directory)
    if trace is None:
        return None
    record, timeline = trace
    path = Path(directory) / f"iteration_{record['iteration']:07d}.png"
    draw({f"{record['schedule']}, iteration {record['iteration']}": timeline}, path, unit="s")
    return path
