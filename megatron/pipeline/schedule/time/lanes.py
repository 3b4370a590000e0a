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
from megatron.pipeline.schedule.time.replay import Link, Numbers, Rows, rows_of

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


class Switch:
    """The copies under way between the devices and host memory behind one switch, and how fast each is.

    Rows are two for every rank, to the host and to the device, from ``first`` on.
    """

    def __init__(self, costs: CopyCosts, first: int) -> None:
        self._costs, self._first = costs, first
        self._now = 0.0
        self._left: dict[int, float] = {}  # by lane, counted from the first: seconds of its copy if it were alone
        self._speeds: dict[int, float] = {}  # 1 for a copy that is alone

    def change(self, now: float, row: int, seconds: float | None) -> dict[int, float]:
        """A row starts a copy of ``seconds`` if alone, or ends it (None); returns when those under way end if nothing changes."""
        for lane, speed in self._speeds.items():
            self._left[lane] = max(0.0, self._left[lane] - (now - self._now) * speed)
        self._now = now
        if seconds is None:
            del self._left[row - self._first]
        else:
            self._left[row - self._first] = seconds
        busy = [sum(lane % 2 == direction for lane in self._left) for direction in (0, 1)]
        self._speeds = {
            lane: min(1.0, self._costs.shared * self._costs.switch / busy[lane % 2])
            * (self._costs.both if lane ^ 1 in self._left else 1.0)
            for lane in self._left
        }
        return {self._first + lane: now + left / self._speeds[lane] for lane, left in self._left.items()}


def switches(ranks: int, costs: CopyCosts) -> dict[int, Switch]:
    """The switch of every row of copies; those rows follow the ones of the ranks."""
    firsts = [ranks + lane // (2 * costs.switch) * 2 * costs.switch for lane in range(2 * ranks)]
    by_first = {first: Switch(costs, first) for first in firsts}
    return {ranks + lane: by_first[first] for lane, first in enumerate(firsts)}


BACK: Any = "back"  # in place of a kind: the wait for a copy to the device


def with_lanes(schedule: Schedule, costs: Costs) -> tuple[Rows, list[list[float]]]:
    """The rows of ranks that wait for their copies, then those of every rank's copies; and the seconds of the latter, alone."""
    numbers, plain = Numbers(schedule), rows_of(schedule, costs)
    passes: list[Sequence[Pass]] = []
    for row in schedule.passes:
        waits = returning(row)
        passes.append([each for work in row for each in ((work._replace(kind=BACK), work) if work in waits else (work,))])
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
    seconds: list[list[float]] = []
    for rank, own in enumerate(schedule.placement.stages):
        lane = lanes(schedule, costs, rank)
        passes += lane.to_host, lane.to_device
        seconds += lane.seconds_to_host, lane.seconds_to_device
        links.append([{D2H: Link(numbers.away[stage], numbers.outputs[stage], 0, 0)} for stage in own])
        links.append([{H2D: Link(numbers.back[stage], numbers.called[stage], 0, 0)} for stage in own])
    return Rows(passes, links, numbers.count_with_lanes), seconds
