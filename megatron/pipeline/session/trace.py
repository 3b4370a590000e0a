"""Measured timelines on disk: ``DIR/iteration_0000020.json`` for every logged iteration, and pictures of the last ones.

A file opens in ui.perfetto.dev, which passes over the fields that are ours: the measured iteration, and what was planned.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from megatron.pipeline.flags.packages import no_picture
from megatron.pipeline.monitor.cost_profile import measured_costs
from megatron.pipeline.monitor.report import Report
from megatron.pipeline.planner import Pass, Timeline, activation_profile, ops, simulate, view
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.session.atomic import write_text

logger = logging.getLogger(__name__)


def write_trace(directory: str, iteration: int, pipeline: Pipeline, report: Report, slow: Sequence[str] = ()) -> None:
    """Write the timeline of one iteration, and the one that its schedule has on paper.

    The planned timeline uses the costs that the run knows. If it knows none, it uses the pass times of this iteration and hops
    that take no time. Its memory is always this iteration's. ``bubble_rate`` is what the log says at the start: at the
    known costs, or at equal ones.

    Args:
        slow: sentences on ranks and links that are slow.
    """
    schedule, measured = report.schedule, measured_costs([report], report)
    planned = simulate(schedule, pipeline.plans.costs or measured)
    at_start = planned if pipeline.plans.costs else simulate(schedule, pipeline.plans.planned_costs)
    memory = activation_profile(schedule, planned, measured)
    waits = [
        [(f"{_verb(message, stages)} {message}", start, end) for message, start, end in one.waits]
        for stages, one in zip(schedule.placement.stages, report.ranks, strict=True)
    ]
    record = {
        "schedule": pipeline.name,
        "iteration": iteration,
        "placement": pipeline.placement.stages,
        "timeline": json.loads(report.timeline.to_json()),
        "waits": waits,
        "memory": report.memory,
        "slow": list(slow),
        "planned": {
            "costs": "of all iterations" if pipeline.plans.costs else "of this iteration",
            "bubble_rate": at_start.bubble_rate,
            "timeline": json.loads(planned.to_json()),
            "memory": memory,
        },
    }
    name = "; ".join(["measured", *slow])
    measured_trace = view.to_trace(report.timeline, schedule, memory=report.memory, waits=waits, name=name)
    planned_trace = view.to_trace(planned, schedule, memory=memory, name="planned", process=1)
    record |= measured_trace | {"traceEvents": measured_trace["traceEvents"] + planned_trace["traceEvents"]}
    path = trace_of(directory, iteration)
    try:
        write_text(path, json.dumps(record))
    except OSError as error:
        logger.warning("WARNING: no trace in %s (%s); training goes on", path, error.strerror)


def _verb(message: ops.Message | ops.Collective | Pass, stages: Sequence[int]) -> str:
    """A rank that waits for a message which one of its own stages made waits until that has been sent."""
    return "send" if isinstance(message, ops.Message) and message.stage in stages else "wait for"


def trace_of(directory: str, iteration: int) -> Path:
    return Path(directory) / f"iteration_{iteration:07d}.json"


def draw_last_trace(directory: str) -> Path | None:
    """Draw the iteration that was written last, below its plan, and return the path of the picture, next to the trace."""
    # By time, not by name: an earlier run into the same directory may have gone further.
    last = max(Path(directory).glob("iteration_*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    if last is None:
        return None
    text, path = last.read_text(), last.with_suffix(".png")
    record = json.loads(text)
    costs = "the run's costs" if record["planned"]["costs"] == "of all iterations" else "this iteration's pass times, free hops"
    planned, measured = f"{record['schedule']}, planned at {costs}", f"measured in iteration {record['iteration']}"
    measured = "\n".join([measured, *record.get("slow", [])])
    try:
        view.draw(
            {planned: Timeline.from_json(json.dumps(record["planned"])), measured: Timeline.from_json(text)},
            path,
            memory={planned: in_mib(record["planned"]["memory"]), measured: in_mib(record["memory"])},
            unit="s",
            memory_unit="MiB",
            waits={measured: [[(start, end) for _, start, end in row] for row in record["waits"]]},
        )
    except (OSError, ModuleNotFoundError) as error:
        logger.warning(no_picture(path, error))
        return None
    return path


def in_mib(profile: view.Profile) -> view.Profile:
    """The memory of a picture, from bytes."""
    return [[(time, held / 2**20) for time, held in steps] for steps in profile]
