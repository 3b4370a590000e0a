"""Recorded iterations that follow one another, on one time axis: where they interlock, each is a parallelogram."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from statistics import mean
from typing import Any, NamedTuple

from megatron.pipeline.planner.schedule.core.reading import parse_json
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline

# Of an iteration's span: by how much two iterations of a rank may overlap. On GPUs, the clock is read anew for each.
_CLOCK_ERROR = 0.01


class Recorded(NamedTuple):
    """Record of an iteration (``iteration_*.json``); that of a timeline alone has neither number nor schedule."""

    number: Any
    schedule: Any
    timeline: Timeline


def recorded(text: str) -> Recorded:
    """The record in the text of a file; a ValueError if there is none."""
    timeline, fields = Timeline.from_json(text), parse_json(text, "an iteration")
    return Recorded(fields.get("iteration"), fields.get("schedule"), timeline)


def joined(iterations: Sequence[Recorded]) -> tuple[str, Timeline]:
    """Title and passes of the iterations of one run, in the order in which they ran; microbatches count from 0 in each.

    Raises:
        ValueError: there are fewer than two, one is left out, or they are of several runs.
    """
    numbers, timelines = [each.number for each in iterations], [each.timeline for each in iterations]
    if len(numbers) < 2 or not all(type(after) is int and after - 1 == before for before, after in pairwise(numbers)):
        raise ValueError(
            f"iterations {', '.join(map(str, numbers))} do not follow one another: name two or more iteration_*.json of "
            "--pipeline-trace, from the first to the last (--log-interval 1 records all of them)"
        )
    if len({(each.schedule, len(each.timeline.ranks)) for each in iterations}) > 1:
        raise ValueError("the iterations ran under several schedules, or on several numbers of ranks: name files of one run")
    for before, after in pairwise(timelines):
        for rank, (earlier, later) in enumerate(zip(before.ranks, after.ranks, strict=True)):
            if not earlier or not later or later[0].start < earlier[-1].end - _CLOCK_ERROR * before.span:
                raise ValueError(f"rank {rank} begins an iteration before it ends the one before: name files of one run")

    def whole(tables: Sequence[Sequence[Sequence[Timed]]]) -> tuple[tuple[Timed, ...], ...]:
        return tuple(tuple(chain(*rows)) for rows in zip(*tables, strict=True))

    copies = [each.copies for each in timelines]
    begins = zip(timelines[0].ranks, timelines[-1].ranks, strict=True)
    period = max(last[0].start - first[0].start for first, last in begins) / (len(timelines) - 1)
    spans = f"span {mean(each.span for each in timelines):.4g} s, bubble {mean(each.span_bubble_rate for each in timelines):.1%}"
    about = f"{iterations[-1].schedule or 'measured'}, iterations {numbers[0]} to {numbers[-1]}"
    return f"{about}: on average one every {period:.4g} s ({spans})", Timeline(
        whole([each.ranks for each in timelines]), whole(copies) if all(copies) else ()
    )
