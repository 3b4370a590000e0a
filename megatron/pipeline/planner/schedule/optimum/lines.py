"""Lines of a problem: all passes of one kind on one stage, with what they take and hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.kinds import sources, stage_kinds
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.problem import Problem

Times = NDArray[np.float64]


class Before(NamedTuple):
    """The index of a line before another; ``hop`` is the seconds between, of which a message occupies its link for ``busy``."""

    other: int
    hop: float | Times
    way: tuple[int, int] = (0, 0)
    busy: float | Times = 0.0


@dataclass(frozen=True)
class Line:
    """All passes of one kind on one stage. They run in the order of their microbatches, so that one can count them.

    Attributes:
        stage, rank: where they run.
        kind: F, R, B (also for BW) or W.
        seconds: of one pass; of every pass, where microbatches are unequal.
        change: the memory that a pass allocates when it starts (positive) or frees when it ends (negative), where its load is 1.
        count: how many passes there are.
        memory: the loads of all passes together, or of every pass where microbatches are unequal.
        before: the lines of which the k-th pass precedes the k-th of this one.
    """

    stage: int
    rank: int
    kind: Kind
    seconds: float | Times
    change: float
    count: int
    memory: float | Times
    before: tuple[Before, ...] = ()

    @property
    def unequal(self) -> bool:
        return isinstance(self.seconds, np.ndarray)

    def between(self, low: Any, high: Any) -> Any:
        """Seconds of the passes from number ``low`` on that are before number ``high``."""
        if not self.unequal:
            return (high - low) * self.seconds
        return self._sums[np.minimum(high, self.count)] - self._sums[np.minimum(low, self.count)]

    def held(self, passes: Any) -> Any:
        """The loads in memory of as many passes, from the first on."""
        return self._held[np.minimum(passes, self.count)] if self.unequal else passes

    @cached_property
    def _sums(self) -> Times:
        return np.cumsum(np.append(0.0, self.seconds))

    @cached_property
    def _held(self) -> Times:
        return np.cumsum(np.append(0.0, self.memory))


def of_passes(each: float | Times, numbers: NDArray[np.int64]) -> float | Times:
    """Values of passes: the same of all, or of those with these numbers, and 0 where there is none."""
    return np.append(each, 0.0)[np.minimum(numbers, len(each))] if isinstance(each, np.ndarray) else each


def lines(problem: Problem) -> tuple[Line, ...]:
    """Every line of a problem, each after those that precede it.

    A backward may be split or fused, whichever a schedule likes, where the problem does not say that it is fused. Let b be
    the shorter of B and BW, and w what the shorter of B + W and BW takes beyond b. A B that takes b and a W that takes w
    stand for both: no pass becomes longer and nothing is held longer if B and W, or BW, are replaced by these. Nor does that B
    allocate, since BW does not.

    Slices of a microbatch count like microbatches.
    """
    return _lines(replace(problem, limits=None))


@lru_cache(maxsize=8)  # a search asks for the bounds of one problem within many limits
def _lines(problem: Problem) -> tuple[Line, ...]:
    placement, costs = problem.placement, cutting.sliced(problem.costs, problem.splits)
    total = problem.microbatches * problem.splits
    stages = range(placement.depth)
    chains = [stage_kinds(stage in problem.recompute, stage in problem.fused) for stage in stages]
    known: dict[tuple[int, Kind], int] = {}
    made: list[Line] = []
    memory = np.array([load.memory for load in costs.loads]) if costs.loads else total

    def each(value: Callable[[Costs], float]) -> float | Times:
        return np.array(costs.each(value, total), float) if costs.loads else float(value(costs))

    forwards = ((stage, kind) for stage in stages for kind in chains[stage] if kind.is_forward)
    backwards = ((stage, kind) for stage in reversed(stages) for kind in chains[stage] if not kind.is_forward)
    for stage, kind in chain(forwards, backwards):
        rank, chunk = placement.home(stage)

        def least_seconds(costs: Costs, stage: int = stage, kind: Kind = kind) -> float:
            return _least_seconds(leanest(costs.stages[stage]), kind)

        before: list[Before] = []
        for source in sources(placement, None)[kind, rank, chunk]:
            home, its_chunk = source.homes[0]
            its_stage = placement.stage(home, its_chunk)

            def message(costs: Costs, home: int = home, rank: int = rank) -> float:
                return costs.message(home, rank)

            def busy(costs: Costs, way: tuple[int, int] = (home, rank)) -> float:
                return costs.in_line.get(way, 0.0)

            needed = next(known[its_stage, other] for other in source.kinds if (its_stage, other) in known)
            before.append(Before(needed, each(message), (home, rank), each(busy)))
        change = leanest(costs.stages[stage]).allocated(kind, stage in problem.recompute)
        own = Kind(kind.row.replaces[0]) if kind.row.replaces else kind
        known[stage, own] = len(made)
        made.append(Line(stage, rank, own, each(least_seconds), float(change), total, memory, tuple(before)))
    return tuple(made)


def leanest(cost: StageCosts) -> StageCosts:
    return replace(cost, retained=cost.activation) if cost.backward_allocates else cost


def _least_seconds(cost: StageCosts, kind: Kind) -> float:
    """Seconds of a pass; of one that another kind can replace, its share of the shorter way (see ``lines``)."""
    for whole in (other for other in Kind if kind in other.row.replaces):
        at, together = whole.row.replaces.index(kind), cost.seconds(whole)
        parts = [cost.seconds(Kind(part)) for part in whole.row.replaces]
        return min(sum(parts[: at + 1]), together) - (min(sum(parts[:at]), together) if at else 0)
    return cost.seconds(kind)


def backwards_in_time(forward: Sequence[Line]) -> list[Line]:
    """The same lines, of schedules that run from the end to the start: what was freed is allocated."""

    def turned(each: float | Times) -> float | Times:
        return each[::-1] if isinstance(each, np.ndarray) else each

    after: list[list[Before]] = [[] for _ in forward]
    for index, line in enumerate(forward):
        for other, hop, way, busy in line.before:
            after[other].append(Before(len(forward) - 1 - index, turned(hop), way, turned(busy)))
    return [
        replace(line, seconds=turned(line.seconds), change=-line.change, memory=turned(line.memory), before=tuple(next_))
        for line, next_ in zip(forward[::-1], after[::-1], strict=True)
    ]
