"""When passes ran, planned or measured: what the simulator returns, the executor records and the pictures draw."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.core.reading import parse_json


class Timed(NamedTuple):
    """A pass with its start and end, in seconds (or the unit of the costs)."""

    work: Pass
    start: float
    end: float


class Lengths(NamedTuple):
    """Length of a timeline that is to be short, and the sum of the moments at which its passes end, which tells equal ones
    apart.
    """

    span: float
    makespan: float
    ends: float


@dataclass(frozen=True)
class Timeline:
    """For every rank, its passes with their times, in the order they ran. Starts and ends share one clock.

    Attributes:
        ranks: what every rank computes. A copy takes no time here: it stands for the moment at which its memory is free (D2H), or
            allocated (H2D).
        copies: for every rank its copies, with the times at which they are on the way; empty where there are none.
    """

    ranks: tuple[tuple[Timed, ...], ...]
    copies: tuple[tuple[Timed, ...], ...] = ()
    _repr_svg_: ClassVar[Callable[..., str | None]]  # ``view.svg``, for notebooks

    @property
    def makespan(self) -> float:
        """First pass of any rank to last pass of any rank."""
        passes = [timed for rank in self.ranks for timed in rank]
        if not passes:
            return 0.0
        return max(timed.end for timed in passes) - min(timed.start for timed in passes)

    @property
    def span(self) -> float:
        """The longest, over ranks, from a rank's first pass to its last."""
        return max((rank[-1].end - rank[0].start for rank in self.ranks if rank), default=0.0)

    @property
    def work(self) -> float:
        """Seconds a rank computes, on average over the ranks: m*(F+B+W) when all stages are equal."""
        return sum(timed.end - timed.start for rank in self.ranks for timed in rank) / len(self.ranks)

    @property
    def bubble_rate(self) -> float:
        """The idle share of the makespan: (makespan - work) / makespan."""
        return _idle_share(self.makespan, self.work)

    @property
    def span_bubble_rate(self) -> float:
        """The idle share of the span, for iterations that interlock."""
        return _idle_share(self.span, self.work)

    def to_json(self) -> str:
        """One JSON object, ``{"ranks": [[["F0.0", start, end], ...], ...]}``, that ``from_json`` reads back; where there are
        ``copies``, with these in the same form."""
        tables = {"ranks": self.ranks} | ({"copies": self.copies} if self.copies else {})
        return json.dumps(
            {
                name: [[[str(timed.work), timed.start, timed.end] for timed in rank] for rank in table]
                for name, table in tables.items()
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what ``to_json`` wrote, also where it is the ``timeline`` of a larger object, as in a recorded trace.

        Raises:
            ValueError: not JSON, not of that form, a pass cannot be read, or a time is not a finite number.
        """
        data = parse_json(text, "a timeline")
        try:
            data = data.get("timeline", data)
            rows, lanes = data["ranks"], data.get("copies", [])
            ranks, copies = (
                tuple(tuple(Timed(Pass.parse(work), start, end) for work, start, end in row) for row in table)
                for table in (rows, lanes)
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f'not a timeline: expected {{"ranks": [[["F0.0", start, end], ...], ...]}} ({why})') from None
        if not isinstance(rows, list) or not ranks:
            raise ValueError("not a timeline: ranks must be a list with the passes of at least one rank")
        if not isinstance(lanes, list) or (copies and len(copies) != len(ranks)):
            raise ValueError("not a timeline: copies must be a list with those of every rank")
        for timed in (timed for rank in (*ranks, *copies) for timed in rank):
            times = (timed.start, timed.end)
            if not all(type(time) in (int, float) and abs(time) < 1e100 for time in times) or timed.start > timed.end:
                raise ValueError(
                    f"not a timeline: {timed.work} needs a start and a later end, got {timed.start!r}, {timed.end!r}"
                )
        return cls(ranks, copies)


def _idle_share(whole: float, work: float) -> float:
    return max(0.0, (whole - work) / whole) if whole > 0 else 0.0  # sums of floats stray in their last bits
