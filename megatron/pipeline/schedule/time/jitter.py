"""Span and makespan of a schedule whose passes have random durations around their costs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.kinds import AnyKind
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.time.links import Rows, rows_of
from megatron.pipeline.schedule.time.replay import replay

Draws: TypeAlias = NDArray[np.float64]  # one number for each draw

MOST_JITTER = 10.0
MOST_DRAWS = 10_000
_AT_ONCE = 500  # draws that are simulated together, in memory


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
        """The mean: the average iteration, if iterations interlock."""
        return float(self.spans.mean())

    @property
    def makespan(self) -> float:
        """The mean: the average iteration, if iterations do not interlock."""
        return float(self.makespans.mean())


def expected(schedule: Schedule, costs: Costs, jitter: float, draws: int = 100, seed: int = 0) -> Expected:
    """Simulate a schedule many times, with the duration of every pass multiplied by a random factor of its own.

    The order of the passes stays as it is: a rank does not reorder them when one is late. Hops and copies take what the costs
    say. With jitter 0 every draw equals ``simulate``.

    Args:
        jitter: the standard deviation of a pass's duration, as a share of it: 0.1 for 10 %. See ``factors``.
        draws: how often to simulate.
        seed: of the random numbers. With the same seed, the same pass of the same stage has the same factors in every
            schedule, so that a comparison of two schedules does not depend on chance.

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
    costs.check_placement(schedule.placement)
    costs = costs.sliced(schedule.splits)
    rows = rows_of(schedule, costs, with_lanes=schedule.has_lanes)
    durations = _drawn(schedule, rows, jitter, draws, seed)
    spans, makespans = np.zeros(draws), np.zeros(draws)
    busy = [rank for rank, passes in enumerate(schedule.passes) if passes]
    for first in range(0, draws if busy else 0, _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
        seconds: list[list[Any]] = [[each if isinstance(each, int) else each[some] for each in row] for row in durations]
        seconds += [[float(alone / costs.slowest(lane.lane)) for alone in lane.seconds] for lane in rows.lanes]
        _, starts, ends = replay(schedule, rows, seconds, np.maximum)
        begins, free = np.zeros((2, len(busy), len(spans[some])))
        for at, rank in enumerate(busy):
            begins[at], free[at] = starts[rank][0], ends[rank][-1]
        spans[some], makespans[some] = (free - begins).max(axis=0), free.max(axis=0) - begins.min(axis=0)
    return Expected(spans, makespans)


def _drawn(schedule: Schedule, rows: Rows, jitter: float, draws: int, seed: int) -> list[list[Draws | int]]:
    """The durations of every rank's passes, by slot; 0 for a slot in which the rank computes nothing."""
    tables: dict[tuple[Kind, int], Draws] = {}  # by kind and stage: durations of all microbatches

    def duration(rank: int, work: Pass, kind: Kind) -> Draws | int:
        seconds = rows.links[rank][work.chunk][work.kind].seconds
        if not seconds:
            return 0
        stage = schedule.placement.stage(rank, work.chunk)
        if (work.kind, stage) not in tables:
            tables[work.kind, stage] = float(seconds) * factors(kind, stage, schedule.slices, jitter, draws, seed)
        return tables[work.kind, stage][work.microbatch]

    return [
        [0 if work is None else duration(rank, key, work.kind) for key, work in zip(keys, works, strict=True)]
        for rank, (keys, works) in enumerate(zip(rows.passes, rows.works, strict=True))
        if rank < schedule.ranks
    ]


def factors(kind: AnyKind, stage: int, microbatches: int, jitter: float, draws: int, seed: int) -> NDArray[np.float64]:
    """Random factors of the durations of one stage's passes of one kind, ``float[microbatches, draws]``.

    They are log-normal, so never negative, with mean 1 and standard deviation ``jitter``: the logarithm is normal with
    variance s = ln(1 + jitter^2) and mean -s/2. All factors are independent.
    """
    variance = np.log1p(jitter**2)
    number = list(Kind).index(kind) if isinstance(kind, Kind) else zlib.crc32(kind.encode())
    generator = np.random.default_rng([seed, stage, number])
    return generator.lognormal(-variance / 2, np.sqrt(variance), (microbatches, draws))
