"""Copies to host memory and back as rows of their own: what a rank's two copy lanes do beside its passes.

A copy to the host starts once its F has ended and the ones before it have, a copy to the device once its place in the rank's row
has been reached and the ones before it have ended. Where copies disturb each other (the directions of one rank, the ranks behind
one switch), all that are on the way go on at the speeds that ``CopyCosts`` says, which change whenever one starts or ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.pipeline.schedule.core.costs import CopyCosts, Costs
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.time.replay import Link, Numbers, Rows

F, R, B, BW, D2H, H2D = Kind.F, Kind.R, Kind.B, Kind.BW, Kind.D2H, Kind.H2D


class Lanes(NamedTuple):
    """The copies of one rank, each lane in its order, with the seconds that each takes alone on the way."""

    to_host: tuple[Pass, ...]
    to_device: tuple[Pass, ...]
    seconds_to_host: list[float]
    seconds_to_device: list[float]


def lanes(schedule: Schedule, costs: Costs, rank: int) -> Lanes:
    """The lanes of a rank: copies to the host in the order of their F, copies to the device in that of the row."""
    passes, stages = schedule.passes[rank], schedule.placement.stages[rank]
    away = {(work.microbatch, work.chunk) for work in passes if work.kind is D2H}
    again = {(work.microbatch, work.chunk) for work in passes if work.kind is R}
    to_host = tuple(Pass(D2H, work.microbatch, work.chunk) for work in passes if work.kind is F and work[1:] in away)
    to_device = tuple(work for work in passes if work.kind is H2D)

    def seconds(row: Sequence[Pass]) -> list[float]:
        return [costs.copy_seconds(stages[work.chunk], work.kind, work[1:] in again) for work in row]

    return Lanes(to_host, to_device, seconds(to_host), seconds(to_device))


def returning(passes: Sequence[Pass]) -> dict[Pass, Pass]:
    """For every pass of a row that waits for a copy to the device, that copy: R, or B or BW where there is no R."""
    again = {(microbatch, chunk) for kind, microbatch, chunk in passes if kind is R}
    back = {work[1:]: work for work in passes if work.kind is H2D}
    return {
        work: back[work[1:]]
        for work in passes
        if work[1:] in back and (work.kind is R or (work.kind in (B, BW) and work[1:] not in again))
    }


def on_the_way(queues: Sequence[Sequence[tuple[float, float]]], costs: CopyCosts) -> list[list[tuple[float, float]]]:
    """When copies start and end that disturb each other.

    Args:
        queues: two for every rank, to the host and to the device; in each, (from when it may start, seconds alone on the way).

    Returns:
        For each of them (start, end).
    """
    found: list[list[tuple[float, float]]] = [[] for _ in queues]
    for first in range(0, len(queues), 2 * costs.switch):
        _behind_one_switch(queues[first : first + 2 * costs.switch], costs, found[first : first + 2 * costs.switch])
    return found


def _behind_one_switch(
    queues: Sequence[Sequence[tuple[float, float]]], costs: CopyCosts, found: Sequence[list[tuple[float, float]]]
) -> None:
    now = 0.0
    under_way: dict[int, tuple[float, float]] = {}  # by queue: start, seconds left of it alone on the way
    while True:
        waiting = []
        for lane, queue in enumerate(queues):
            if lane not in under_way and len(found[lane]) < len(queue):
                ready, seconds = queue[len(found[lane])]
                if ready <= now:
                    under_way[lane] = now, seconds
                else:
                    waiting.append(ready)
        if not under_way and not waiting:
            return
        busy = [sum(lane % 2 == direction for lane in under_way) for direction in (0, 1)]
        speeds = {
            lane: min(1.0, costs.shared * costs.switch / busy[lane % 2]) * (costs.both if lane ^ 1 in under_way else 1.0)
            for lane in under_way
        }
        ends = {lane: now + left / speeds[lane] for lane, (_, left) in under_way.items()}
        later = min((*ends.values(), *waiting))
        for lane, (start, left) in list(under_way.items()):
            if ends[lane] <= later:
                found[lane].append((start, later))
                del under_way[lane]
            else:
                under_way[lane] = start, left - (later - now) * speeds[lane]
        now = later


BACK: Any = "back"  # in place of a kind: the wait for a copy to the device


def beside_ranks(schedule: Schedule, plain: Rows, beside: Sequence[Lanes]) -> Rows:
    """The rows of ranks that wait for their copies, and those of the copies."""
    numbers = Numbers(schedule)
    passes: list[Sequence[Pass]] = []
    for row in schedule.passes:
        waits = returning(row)
        passes.append([one for work in row for one in ((work._replace(kind=BACK), work) if work in waits else (work,))])
    links = []
    for own, row_links in zip(schedule.placement.stages, plain.links, strict=True):
        waiting = [
            {
                D2H: Link(numbers.nowhere, numbers.away[stage], 0, 0),
                H2D: Link(numbers.called[stage], numbers.nothing, 0, 0),
                BACK: Link(numbers.nowhere, numbers.back[stage], 0, 0),
            }
            for stage in own
        ]
        links.append([by_kind | more for by_kind, more in zip(row_links, waiting, strict=True)])
    for own, lane in zip(schedule.placement.stages, beside, strict=True):
        passes += lane.to_host, lane.to_device
        links.append([{D2H: Link(numbers.away[stage], numbers.outputs[stage], 0, 0)} for stage in own])
        links.append([{H2D: Link(numbers.back[stage], numbers.called[stage], 0, 0)} for stage in own])
    return Rows(passes, links, numbers.count_with_lanes)
