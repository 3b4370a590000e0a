"""The lowest peak memory of a rank that offloads without making a pass wait: a constraint model for OR-Tools CP-SAT."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.passes import Offload
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.offload import Rank, offload

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar

_GRID = 10**6  # units for the largest value, if values are not simple fractions
_STRAY = 1e-3  # of a unit: rounding errors are below this


@dataclass(frozen=True)
class LeastPeak:
    """The result of the search, in the costs' unit of memory.

    Attributes:
        value: the lowest peak found; that of ``offload`` if the search finds none below it.
        bound: no selection and placing of copies has a lower peak.
        proven: whether the two are equal.
    """

    value: float
    bound: float
    proven: bool


def least_peak(
    schedule: Schedule,
    costs: Costs,
    rank: int,
    mode: Offload = Offload.FULL,
    host_limit: float | None = None,
    seconds: float = 10.0,
) -> LeastPeak:
    """The lowest peak of one rank over all selections of activations to offload and all times of their copies.

    Passes keep their order and their times. Copies to the host run in the order of their F, as in any schedule; copies back in
    any order. Between the same two passes all copies to the host count before all copies back, and times and sizes that are not
    simple fractions are rounded in favour of a lower peak. So no plan has a peak below ``bound``, while the plan found for
    ``value`` may hold more between two passes, or delay a pass by the rounding.

    Args:
        schedule: without copies.
        mode, host_limit: as in ``offload``.
        seconds: how long to search, in wall-clock seconds, on one thread, which takes the same way every time.

    Raises:
        ValueError: as ``offload``.
    """
    known = activation_peaks(offload(schedule, costs, mode, host_limit=host_limit), costs)[rank]
    row = Rank(schedule, costs, rank, simulate(schedule, costs).ranks[rank])
    count = len(row.works)
    if not count:
        return LeastPeak(known, known, True)
    model = _Model(row, known)
    if mode is Offload.SELECTIVE:
        model.add_limit(range(count), float(row.sizes.sum()) / 2)
    if host_limit is not None:
        model.keep_no_more_away_than(host_limit)
    found, bound = model.solve(seconds)
    value = min(known, found)
    if bound >= value - 1 / model.memory:
        bound = value
    return LeastPeak(value, bound, bound == value)


class _Model:
    """The constraint model: times and sizes in whole multiples of ``1/scale``, each rounded in favour of a lower peak."""

    def __init__(self, row: Rank, known: float) -> None:
        from ortools.sat.python import cp_model  # slow to import, and not needed to plan

        self._row, self._model = row, cp_model.CpModel()
        self._count = range(len(row.works))
        starts, ends, needed = row.starts.tolist(), row.ends.tolist(), row.needed.tolist()
        self.time = _scale([*starts, *ends, *row.to_host.tolist(), *row.to_device.tolist()])
        self.memory = _scale([*row.during.tolist(), *row.sizes.tolist()])
        self._sizes = [_up(size, self.memory) for size in row.sizes.tolist()]
        self._chosen = [self._model.new_bool_var("") for _ in self._count]
        self._horizon = _up(ends[-1], self.time)
        self._gone = self._to_host()
        self._called = self._to_device([_up(starts[slot], self.time) for slot in needed])
        self._add_peak(
            [_up(start, self.time) for start in starts], [_down(end, self.time) for end in ends], _up(known, self.memory)
        )

    def _to_host(self) -> list[IntVar]:
        """The ends of copies to the host: each starts once its F and the copy before it have ended."""
        lane = [self._model.new_int_var(0, self._horizon, "") for _ in self._count]
        ends, seconds = self._row.ends[self._row.made].tolist(), self._row.to_host.tolist()
        for at, end in enumerate(lane):
            taken = _down(seconds[at], self.time)
            self._model.add(end >= _down(ends[at], self.time) + taken).only_enforce_if(self._chosen[at])
            if at:
                self._model.add(end >= lane[at - 1] + taken * self._chosen[at])
        return lane

    def _to_device(self, needed: Sequence[int]) -> list[IntVar]:
        """The starts of copies back: one at a time, each after its copy to the host and in time for the pass that needs it."""
        model, starts, intervals = self._model, [], []
        for at, seconds in enumerate(self._row.to_device.tolist()):
            taken = _down(seconds, self.time)
            start = model.new_int_var(0, self._horizon, "")
            model.add(start >= self._gone[at]).only_enforce_if(self._chosen[at])
            model.add(start + taken <= needed[at]).only_enforce_if(self._chosen[at])
            intervals.append(model.new_optional_fixed_size_interval_var(start, taken, self._chosen[at], ""))
            starts.append(start)
        model.add_no_overlap(intervals)
        return starts

    def _add_peak(self, starts: Sequence[int], ends: Sequence[int], known: int) -> None:
        """The peak: the memory of a slot is reduced by the activations that are on the host throughout it."""
        row, model = self._row, self._model
        made, needed = row.made.tolist(), row.needed.tolist()
        levels = [_down(level, self.memory) for level in row.during.tolist()]
        alive = [[at for at in self._count if made[at] < slot < needed[at]] for slot in range(len(levels))]
        least = max(level - sum(self._sizes[at] for at in some) for level, some in zip(levels, alive, strict=True))
        self._peak = model.new_int_var(max(0, least), known, "peak")
        for slot, (level, some) in enumerate(zip(levels, alive, strict=True)):
            if level <= least:
                continue
            away = [model.new_bool_var("") for _ in some]
            for at, here in zip(some, away, strict=True):
                model.add_implication(here, self._chosen[at])
                model.add(self._gone[at] <= starts[slot]).only_enforce_if(here)
                model.add(self._called[at] >= ends[slot]).only_enforce_if(here)
            model.add(self._peak >= level - sum(self._sizes[at] * here for at, here in zip(some, away, strict=True)))
        model.minimize(self._peak)

    def keep_no_more_away_than(self, most: float) -> None:
        """The limit of host memory, which an activation occupies from the end of F to the start of the pass that needs it."""
        made, needed = self._row.made.tolist(), self._row.needed.tolist()
        for slot in made:
            self.add_limit([at for at in self._count if made[at] <= slot < needed[at]], most)

    def add_limit(self, some: Iterable[int], most: float) -> None:
        """That some activations which move are of no more than this size."""
        sizes = [_down(size, self.memory) for size in self._row.sizes.tolist()]
        self._model.add(sum(sizes[at] * self._chosen[at] for at in some) <= _up(most, self.memory))

    def solve(self, seconds: float) -> tuple[float, float]:
        """The lowest peak found (infinite if none was) and a lower bound."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        status = solver.solve(self._model).name  # type: ignore[attr-defined]
        found = solver.value(self._peak) / self.memory if status in ("OPTIMAL", "FEASIBLE") else math.inf
        return found, math.ceil(solver.best_objective_bound - 1e-6) / self.memory


def _scale(values: Iterable[float]) -> float:
    """The factor that makes values whole numbers, if they are fractions with small denominators; else one for a fine grid."""
    given = list(values)
    simple = [Fraction(value).limit_denominator(1000) for value in given]
    scale = math.lcm(*(value.denominator for value in simple))
    if scale <= _GRID and all(abs(rough - value) <= 1e-9 * (1 + value) for rough, value in zip(simple, given, strict=True)):
        return scale
    return _GRID / max(given)


def _down(value: float, scale: float) -> int:
    return math.floor(value * scale + _STRAY)


def _up(value: float, scale: float) -> int:
    return math.ceil(value * scale - _STRAY)
