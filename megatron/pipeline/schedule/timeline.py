"""When passes ran, planned or measured: what the simulator returns, the executor records and the pictures draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.pipeline.schedule.passes import Pass


class Timed(NamedTuple):
    """A pass with its start and end, in seconds (or the unit of the costs)."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """For every rank, its passes with their times, in the order they ran. Starts and ends share one clock."""

    ranks: tuple[tuple[Timed, ...], ...]

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
        """The idle share of the span: (span - work) / span."""
        return _idle_share(self.span, self.work)

    @property
    def makespan_bubble_rate(self) -> float:
        """The idle share of the makespan."""
        return _idle_share(self.makespan, self.work)


def _idle_share(whole: float, work: float) -> float:
    return (whole - work) / whole if whole > 0 else 0.0
