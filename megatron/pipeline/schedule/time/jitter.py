"""What a schedule takes where its passes do not all take what the costs say: span and makespan under random durations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import COPY_KINDS, Kind, Pass
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.time.links import lane_rows
from megatron.pipeline.schedule.time.replay import dependency_order
from megatron.pipeline.schedule.time.simulate import check_stages, delay

Draws: TypeAlias = NDArray[np.float64]  # one number for each draw

MOST_JITTER = 10.0
MOST_DRAWS = 10_000


@dataclass(frozen=True, eq=False)
class Expected:
    """The spans and makespans of one schedule under random durations, in the unit of the costs.

    Attributes:
        spans, makespans: of every draw.
    """

    spans: Draws
    makespans: Draws

    @property
    def span(self) -> float:
        """The mean: what an iteration takes in the long run, where iterations interlock."""
        return float(self.spans.mean())

    @property
    def makespan(self) -> float:
        """The mean: what an iteration takes in the long run, where iterations do not interlock."""
        return float(self.makespans.mean())

    @property
    def span_95(self) -> float:
        """What 95 % of the spans do not exceed."""
        return float(np.quantile(self.spans, 0.95))

    @property
    def makespan_95(self) -> float:
        """What 95 % of the makespans do not exceed."""
        return float(np.quantile(self.makespans, 0.95))


def expected(schedule: Schedule, costs: Costs, jitter: float, draws: int = 100, seed: int = 0) -> Expected:
    """Simulate a schedule many times, with every pass longer or shorter by a random factor of its own.

    The order of the passes stays what it is: ranks do not reorder them because one is late. Hops take what the costs say.
    With jitter 0 every draw is what ``simulate`` says.

    Args:
        jitter: the standard deviation of a pass's duration, as a share of it: 0.1 for 10 %. See ``factors``.
        draws: how often to simulate.
        seed: of the random numbers. With the same seed, the same pass of the same stage has the same factors in every
            schedule, so that schedules differ by what they are and not by their luck.

    Raises:
        ValueError: jitter, draws or seed is out of range, the costs are for another number of stages, or the schedule
            cannot finish.
    """
    if not 0 <= jitter <= MOST_JITTER:
        raise ValueError(f"jitter is a share of a pass's duration, 0 to {MOST_JITTER:g}, such as 0.1 for 10 %; got {jitter}")
    if not 1 <= draws <= MOST_DRAWS:
        raise ValueError(f"a schedule can be simulated with 1 to {MOST_DRAWS} draws, got {draws}")
    if seed < 0:
        raise ValueError(f"a seed must be a whole number of at least 0, got {seed}")
    check_stages(schedule.placement, costs)
    costs = costs.sliced(schedule.splits)
    durations: dict[tuple[Kind, int], Draws] = {}
    ends: dict[tuple[int, Pass], Draws] = {}  # of what ranks make for each other, until it is used; of a vocabulary many do
    free = np.zeros((schedule.ranks, draws))
    begins = np.zeros((schedule.ranks, draws))
    copying = _Copies(schedule, costs, draws)
    for rank, slots in dependency_order(schedule):
        for slot in slots:
            work = schedule.passes[rank][slot]
            kind, stage = work.kind, schedule.placement.stage(rank, work.chunk)
            if (kind, stage) not in durations and not kind.is_copy:
                seconds = float(costs.seconds(kind, stage))
                durations[kind, stage] = seconds * factors(kind, stage, schedule.slices, jitter, draws, seed)
            start = free[rank]
            for other, need in schedule.predecessors(rank, work):
                if other != rank or need.kind.is_of_vocabulary:
                    made = ends[other, need] if schedule.vocabulary else ends.pop((other, need))
                    start = np.maximum(start, made + float(delay(schedule, costs, rank, work, other, need)))
            if slot == 0:
                begins[rank] = start
            if kind.is_copy:
                free[rank] = copying.reached(rank, work, start)
                continue
            free[rank] = copying.ready(rank, work, start) + durations[kind, stage][work.microbatch]
            copying.ended(rank, work, free[rank])
            if kind is Kind.F or kind.sends_gradient or kind.is_of_vocabulary:
                ends[rank, work] = free[rank].copy()
    busy = [rank for rank, passes in enumerate(schedule.passes) if passes]
    if not busy:
        return Expected(np.zeros(draws), np.zeros(draws))
    begins, free = begins[busy], free[busy]
    return Expected((free - begins).max(axis=0), free.max(axis=0) - begins.min(axis=0))


class _Copies:
    """The copy lanes of all ranks: copies take what the costs say, with everything else on the way."""

    def __init__(self, schedule: Schedule, costs: Costs, draws: int) -> None:
        self._seconds: dict[tuple[int, Pass], float] = {}
        self._free = {(rank, kind): np.zeros(draws) for rank in range(schedule.ranks) for kind in COPY_KINDS}
        self._ends: dict[tuple[int, Pass], Draws] = {}
        self._rows = schedule.rows
        for lane in lane_rows(schedule, costs):
            for work, seconds in zip(lane.passes, lane.seconds, strict=True):
                self._seconds[lane.rank, work] = float(seconds / costs.copies.slowest)

    def ready(self, rank: int, work: Pass, start: Draws) -> Draws:
        """When a pass that could start otherwise starts: once what it needs is back on the device."""
        for copy in self._rows[rank].awaited.get(work, ()):
            start = np.maximum(start, self._ends.pop((rank, copy)))
        return start

    def ended(self, rank: int, work: Pass, end: Draws) -> None:
        """A pass has ended: a copy to host memory of what it keeps starts."""
        copy = work._replace(kind=Kind.D2H)
        if work.kind is Kind.F and (rank, copy) in self._seconds:
            self._start(rank, copy, end)

    def reached(self, rank: int, work: Pass, start: Draws) -> Draws:
        """When a rank goes on behind the place of a copy in its row."""
        if work.kind is Kind.D2H:
            return np.maximum(start, self._ends.pop((rank, work)))
        self._start(rank, work, start)
        return start

    def _start(self, rank: int, copy: Pass, at: Draws) -> None:
        begin = np.maximum(self._free[rank, copy.kind], at)
        self._free[rank, copy.kind] = self._ends[rank, copy] = begin + self._seconds[rank, copy]


def factors(kind: Kind, stage: int, microbatches: int, jitter: float, draws: int, seed: int) -> NDArray[np.float64]:
    """What the durations of one stage's passes of one kind are multiplied by, ``float[microbatches, draws]``.

    Log-normal, so that a pass can take much longer but never less than nothing, with mean 1 and standard deviation
    ``jitter``: the logarithm is normal with variance s = ln(1 + jitter^2) and mean -s/2. All factors are independent.
    """
    variance = np.log1p(jitter**2)
    generator = np.random.default_rng([seed, stage, list(Kind).index(kind)])
    return generator.lognormal(-variance / 2, np.sqrt(variance), (microbatches, draws))
