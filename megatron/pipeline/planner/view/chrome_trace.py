"""Timelines as a trace for ``ui.perfetto.dev`` or ``chrome://tracing``, planned or measured.

The format is the JSON of Google's *Trace Event Format*: one process per pipeline, one thread per rank, one complete event
per pass and per wait, two more threads per rank for its copies to host memory and back where there are any, one counter per
rank for its activation memory, and a flow from every pass to the one on another rank
that needs its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.lower.lower import messages
from megatron.pipeline.planner.schedule.time.simulate import activation_profile
from megatron.pipeline.planner.view.style import lane_kinds, start_of, with_whole_braids

_Event = dict[str, Any]
_Clock = Callable[[float], float]


def to_trace(
    timeline: Timeline,
    schedule: Schedule | None = None,
    costs: Costs | None = None,
    *,
    name: str | None = None,
    process: int = 0,
    memory: Sequence[Sequence[tuple[float, float]]] | None = None,
    waits: Sequence[Sequence[tuple[str, float, float]]] = (),
) -> dict[str, Any]:
    """One object that ``json.dump`` writes and the viewers open.

    Several pipelines fit into one file: give each its own ``process`` and join their ``traceEvents``.

    Args:
        timeline: what ran when, in seconds; its first pass is moved to 0, and times become microseconds.
        schedule: whose timeline it is; adds the stage of every pass, its slice, and the flows between ranks.
        costs: with a schedule, adds every rank's activation memory, in the costs' unit.
        name: of the process; by default the schedule's.
        process: the number of the process.
        memory: for each rank, moments and what it holds from then on, where that was measured instead of following from costs.
        waits: for each rank, what it waited for between its passes, with start and end.

    Raises:
        ValueError: the timeline is not one of this schedule, or the costs are for another number of stages.
    """
    if schedule is not None:
        _check_same(timeline, schedule)
    clock = _clock(timeline)
    named = [_label(process, 0, "process_name", name=name or (schedule.name if schedule else "pipeline"))]
    for thread, label, place in _threads(timeline):
        named += [
            _label(process, thread, "thread_name", name=label),
            _label(process, thread, "thread_sort_index", sort_index=place),
        ]
    events = list(_passes(timeline, schedule, clock))
    if schedule is not None:
        events += _flows(timeline, schedule, clock, process)
        if costs is not None and memory is None:
            memory = activation_profile(schedule, timeline, costs)
    events += [
        {"ph": "X", "name": name, "cat": "wait", "tid": rank, "ts": clock(start), "dur": round(clock(end) - clock(start), 3)}
        for rank, row in enumerate(waits)
        for name, start, end in row
    ]
    events += _memory(memory or (), clock)
    # The sort is stable, so that at one time a pass comes before the flow that ends in it.
    ordered = sorted(({**event, "pid": process} for event in events), key=lambda event: event["ts"])
    return {"traceEvents": named + ordered, "displayTimeUnit": "ms"}


def _clock(timeline: Timeline) -> _Clock:
    """From the timeline's seconds to microseconds since its first pass."""
    begin = start_of(timeline)
    return lambda time: round(float(time - begin) * 1e6, 3)


def _label(process: int, thread: int, kind: str, **values: object) -> _Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": values}


def _threads(timeline: Timeline) -> Iterator[tuple[int, str, int]]:
    """Number, name and place of every thread: a rank's own number is its passes' thread, and its lanes stand below it."""
    ranks, kinds = len(timeline.ranks), lane_kinds(timeline)
    for rank in range(ranks):
        yield rank, f"rank {rank}", (1 + len(kinds)) * rank
        for lane, kind in enumerate(kinds):
            yield (1 + lane) * ranks + rank, f"rank {rank} {kind}", (1 + len(kinds)) * rank + 1 + lane


def _passes(timeline: Timeline, schedule: Schedule | None, clock: _Clock) -> Iterator[_Event]:
    splits, ranks, kinds = schedule.splits if schedule else 1, len(timeline.ranks), lane_kinds(timeline)
    for rank, row in enumerate(timeline.ranks):
        computed = [timed for timed in row if not timed.work.kind.is_copy]
        whole = (timed for timed, _ in with_whole_braids(computed))  # the halves of a braid are one below the other
        for work, start, end in (*whole, *(timeline.copies[rank] if timeline.copies else ())):
            thread = (1 + kinds.index(work.kind)) * ranks + rank if work.kind.is_copy else rank
            number, slice_ = divmod(work.microbatch, splits)
            values = {"microbatch": number, "chunk": work.chunk}
            if schedule and not work.kind.is_of_vocabulary:
                values["stage"] = schedule.placement.stage(rank, work.chunk)
            if splits > 1:
                values["slice"] = slice_
            begin = clock(start)
            length = round(clock(end) - begin, 3)
            yield {"ph": "X", "name": str(work), "cat": str(work.kind), "tid": thread, "ts": begin, "dur": length, "args": values}


def _flows(timeline: Timeline, schedule: Schedule, clock: _Clock, process: int) -> Iterator[_Event]:
    for number, (message, sender, producer, receiver, consumer) in enumerate(messages(schedule)):
        _, start, end = timeline.ranks[sender][producer]
        about = {"cat": str(message.flow), "name": str(message.flow), "id": f"{process}.{number}"}
        # A flow belongs to the pass that runs at its time: at the very end that would be the next one.
        yield {**about, "ph": "s", "tid": sender, "ts": clock(end - (end - start) / 100)}
        yield {**about, "ph": "f", "bp": "e", "tid": receiver, "ts": clock(timeline.ranks[receiver][consumer].start)}


def _memory(memory: Sequence[Sequence[tuple[float, float]]], clock: _Clock) -> Iterator[_Event]:
    for rank, steps in enumerate(memory):
        name = f"activation memory of rank {rank}"
        for time, held in steps:
            yield {"ph": "C", "name": name, "tid": rank, "ts": clock(time), "args": {"held": float(held)}}


def _check_same(timeline: Timeline, schedule: Schedule) -> None:
    if len(timeline.ranks) != schedule.ranks:
        raise ValueError(f"a timeline of {len(timeline.ranks)} ranks is not one of {schedule.name} with {schedule.ranks}")
    for rank, (row, passes) in enumerate(zip(timeline.ranks, schedule.passes, strict=True)):
        if tuple(timed.work for timed in row) != passes:
            raise ValueError(
                f"rank {rank} of the timeline ran other passes than {schedule.name} has there, or in another order; give the "
                "schedule that it is of, or none"
            )
