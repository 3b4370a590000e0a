"""The best schedule there is, for instances small enough to search: a constraint model for OR-Tools CP-SAT."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.kinds import STAGE_KINDS, stage_kinds
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.core.stage_costs import PARTS
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.time.simulate import simulate

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntervalVar, IntVar, LinearExprT


@dataclass(frozen=True)
class Optimum:
    """What the search found.

    Attributes:
        schedule: the best schedule found; it obeys every rule and the limits.
        value: its span or makespan, simulated with the problem's own costs.
        bound: no schedule has less, in the same unit.
        proven: whether the schedule is optimal, up to the rounding that ``optimum`` describes.
    """

    schedule: Schedule
    value: float
    bound: float
    proven: bool


def optimum(problem: Problem, seconds: float = 60.0, hint: Schedule | None = None) -> Optimum:
    """The schedule with the least span or makespan, whichever the problem wants.

    All schedules are searched that run R and BW on the stages that the problem says, and B and W elsewhere, or BW where
    that takes or holds less than B and W.

    A spread vocabulary's passes are not searched, and no braids.

    CP-SAT counts in whole numbers. Times and sizes that are fractions with small denominators are scaled to whole numbers.
    Others are rounded down, times to a grid of 1/20000 of the longest pass, so that the bound holds and ``value``, from the
    real times, can be that much above it; sizes by so little that ``verify`` forgives it.

    Args:
        seconds: how long to search, in wall-clock seconds.
        hint: a schedule of the same problem to start from; it is returned where nothing better is found.

    Raises:
        ValueError: no schedule was found in time.
    """
    least = lower_bound(problem)
    model = Model(problem)
    if hint is not None:
        model.start_from(hint)
    solver, status = model.solve(seconds)
    bound = max(float(model.unit * Fraction(math.ceil(solver.best_objective_bound - 1e-6))), least)
    found = [] if hint is None else [hint]
    if status in ("OPTIMAL", "FEASIBLE"):
        found.append(model.schedule(solver))
    best: tuple[float, Schedule] | None = None
    for schedule in found:
        try:
            verify(schedule, problem.costs, problem.limits)
        except ScheduleError:
            continue  # a hint that is none, or passes without length that begin together, in an order that holds too much
        value = problem.value(simulate(schedule, problem.costs))
        if best is None or value < best[0]:
            best = value, schedule
    if best is None:
        raise ValueError(f"no schedule found in {seconds:g} seconds; give more time, or a schedule to start from")
    value, schedule = best
    # Where a rank may begin with one pass or another, the search may delay the first one, which a schedule cannot say.
    ended = status == "OPTIMAL" and all(model.first_start(rank) is not None for rank in range(problem.ranks))
    return Optimum(schedule, value, min(bound, value), ended or bound >= value * (1 - 1e-9))


class Model:
    """The constraint model: a start for every pass, in whole multiples of ``unit`` seconds."""

    def __init__(self, problem: Problem) -> None:
        from ortools.sat.python import cp_model  # slow to import, and not needed to plan

        self._problem = problem
        self._sliced = cutting.sliced(problem.costs, problem.splits)
        self._empty = Schedule("optimum", problem.placement, problem.microbatches, ((),) * problem.ranks, problem.splits)
        self.unit, self._of = _whole_seconds([self._sliced.of(number) for number in range(self._empty.slices)])
        self._costs = self._of[0]  # of the first microbatch
        self._passes = [self._passes_of(rank) for rank in range(problem.ranks)]
        self._model = cp_model.CpModel()
        self._starts: dict[tuple[int, Pass], IntVar] = {}
        self._ends: dict[tuple[int, Pass], LinearExprT] = {}
        self._fused: dict[tuple[int, Pass], IntVar] = {}  # by B: whether it is a BW, so that its W takes no time
        seconds = sum(self._length(rank, work) for rank, works in enumerate(self._passes) for work in works)
        self._horizon = seconds + 2 * len(self._costs.stages) * sum(int(_slowest(costs)) for costs in self._of)
        for rank, works in enumerate(self._passes):
            self._add_passes(rank, works)
            self._add_order(rank)
            if problem.limits is not None:
                self._add_limit(rank, problem.limits[rank])
        self._add_dependencies()
        self._add_objective()

    def _passes_of(self, rank: int) -> list[Pass]:
        """Every pass of a rank: B and W of what may run either fused or split."""
        works = []
        for chunk, stage in enumerate(self._problem.placement.stages[rank]):
            kinds = stage_kinds(stage in self._problem.recompute, stage in self._problem.fused)
            works += [Pass(kind, number, chunk) for number in range(self._empty.slices) for kind in kinds]
        return works

    def _stage(self, rank: int, work: Pass) -> StageCosts:
        return self._of[work.microbatch].stages[self._problem.placement.stage(rank, work.chunk)]

    def _length(self, rank: int, work: Pass) -> int:
        return int(self._stage(rank, work).seconds(work.kind))

    def _add_passes(self, rank: int, works: list[Pass]) -> None:
        model = self._model
        intervals: list[IntervalVar] = []
        for work in works:
            stage, key, length = self._stage(rank, work), (rank, work), self._length(rank, work)
            start = self._starts[key] = model.new_int_var(0, self._horizon, f"{work}@{rank}")
            size: LinearExprT = length
            if work.kind is Kind.B and (stage.value("fused") < stage.backward + stage.weight or stage.backward_allocates):
                fused = self._fused[key] = model.new_bool_var(f"fused {work}@{rank}")
                size = length + (int(stage.value("fused")) - length) * fused
            elif work.kind is Kind.W and (rank, work._replace(kind=Kind.B)) in self._fused:
                before = (rank, work._replace(kind=Kind.B))
                size = length - length * self._fused[before]
                model.add(start == self._ends[before]).only_enforce_if(self._fused[before])
            # An interval's end may not depend on two variables: what may be fused gets a variable of its own.
            end = start + size if isinstance(size, int) else model.new_int_var(0, self._horizon, f"end {work}@{rank}")
            self._ends[key] = end
            intervals.append(model.new_interval_var(start, size, end, f"[{work}@{rank}]"))
        model.add_no_overlap(intervals)

    def _add_order(self, rank: int) -> None:
        """F of one chunk in microbatch order, and so on, as ``verify`` wants it; it also breaks the symmetry."""
        lines: dict[tuple[Kind, int], list[Pass]] = {}
        for work in self._passes[rank]:
            lines.setdefault((work.kind, work.chunk), []).append(work)
        for line in lines.values():
            for first, second in pairwise(sorted(line, key=self._turn)):
                self._model.add(self._ends[rank, first] <= self._starts[rank, second])

    def _turn(self, work: Pass) -> tuple[int, bool, int]:
        """Sorts passes by microbatch, its forwards first, by slice: backwards of slices run in reverse."""
        microbatch, part = divmod(work.microbatch, self._problem.splits)
        return microbatch, work.kind is not Kind.F, part if work.kind is Kind.F else -part

    def _add_dependencies(self) -> None:
        schedule = replace(self._empty, passes=tuple(map(tuple, self._passes)))
        for rank, works in enumerate(self._passes):
            for work in works:
                for other, before in schedule.predecessors(rank, work):
                    hop = int(self._of[work.microbatch].message(other, rank))
                    self._model.add(self._ends[other, before] + hop <= self._starts[rank, work])

    def _add_limit(self, rank: int, limit: float) -> None:
        """What a pass allocates is held until passes that free as much have ended, the last allocated first. Ranks run one pass
        at a time, so that this is a cumulative."""
        changes = {work: self._change(rank, work) for work in self._passes[rank]}
        if sum(max(0.0, change) for change in changes.values()) <= limit:
            return
        unit, _ = _whole([*map(abs, changes.values()), limit], Fraction(limit) / 10**12)
        intervals: list[IntervalVar] = []
        demands: list[LinearExprT] = []
        held: dict[tuple[int, int], list[tuple[float, Pass]]] = {}  # by microbatch and chunk
        for work in self._passes[rank]:
            change, stack = changes[work], held.setdefault(work[1:3], [])
            if change > 0:
                stack.append((change, work))
            while change < 0 and stack:
                size, first = stack.pop()
                if size + change > 0:
                    stack.append((size + change, first))
                freed, change = min(size, -change), change + size
                start, end = self._starts[rank, first], self._ends[rank, work]
                length = self._model.new_int_var(0, self._horizon, "")
                intervals.append(self._model.new_interval_var(start, length, end, f"{first}..{work}@{rank}"))
                amount = math.floor(Fraction(freed) / unit + Fraction(1, 10**9))
                fused = self._fused.get((rank, first))  # a BW allocates nothing
                demands.append(amount if fused is None else amount - amount * fused)
        self._model.add_cumulative(intervals, demands, math.floor(Fraction(limit) / unit + Fraction(1, 10**9)))

    def _change(self, rank: int, work: Pass) -> float:
        """The memory that a pass allocates (positive) or frees (negative)."""
        stage = self._problem.placement.stage(rank, work.chunk)
        return self._sliced.of(work.microbatch).allocated(work.kind, stage, stage in self._problem.recompute)

    def _add_objective(self) -> None:
        """The span is that of the rank with the longest; the makespan counts from 0."""
        model = self._model
        self._value = model.new_int_var(0, self._horizon, "value")
        for rank, works in enumerate(self._passes):
            begin = model.new_int_var(0, self._horizon, f"begin@{rank}")
            known = self.first_start(rank)
            if known is not None:
                model.add(begin == known)
            else:
                model.add_min_equality(begin, [self._starts[rank, work] for work in works if work.kind is Kind.F])
            for work in works:
                if work.kind in (Kind.W, Kind.BW):
                    model.add(self._ends[rank, work] <= self._value + begin)
        model.add(self._value >= math.ceil(self._least() * (1 - 1e-9)))
        model.minimize(self._value)

    def _least(self) -> float:
        """A bound, in whole seconds; of unequal microbatches none, since each is rounded down by another amount."""
        if self._problem.costs.loads:
            return 0.0
        return lower_bound(replace(self._problem, costs=self._costs, microbatches=self._empty.slices, splits=1))

    def first_start(self, rank: int) -> int | None:
        """From when on a rank's time counts, where that is the same for every schedule: passes run as soon as they can.

        For the makespan from 0; for the span it is so where the first microbatch passes no rank twice on its way. None
        where a rank may begin with one pass or another.
        """
        placement = self._problem.placement
        time = 0
        if self._problem.objective is Objective.MAKESPAN:
            return 0
        for stage in range(min(placement.stages[rank]) + 1):
            home, _ = placement.home(stage)
            if min(placement.stages[home]) != stage:
                return None
            if stage:
                before = placement.home(stage - 1)[0]
                time += int(self._costs.stages[stage - 1].forward) + int(self._costs.message(before, home))
        return time

    def start_from(self, hint: Schedule) -> None:
        """Give the solver a schedule's times to start from."""
        whole = simulate(replace(hint, microbatches=hint.slices, splits=1), self._sliced)
        for rank, passes in enumerate(whole.ranks):
            for work, start, _ in passes:
                key = (rank, work._replace(kind=Kind.B) if work.kind is Kind.BW and (rank, work) not in self._starts else work)
                if key in self._starts:
                    self._model.add_hint(self._starts[key], int(start / self.unit))

    def solve(self, seconds: float) -> tuple[CpSolver, str]:
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 1  # so that the search takes the same way every time
        solver.parameters.random_seed = 0
        return solver, solver.solve(self._model).name

    def schedule(self, solver: CpSolver) -> Schedule:
        """The passes in the order of the solver's times.

        Passes that take no time can begin together; microbatch by microbatch they keep every dependency.
        """
        rows = []
        for rank, works in enumerate(self._passes):
            timed = []
            for work in works:
                start, end = solver.value(self._starts[rank, work]), solver.value(self._ends[rank, work])
                stage = self._problem.placement.stage(rank, work.chunk)
                along = stage if work.kind is Kind.F else -stage
                timed.append((start, end, *self._turn(work), along, STAGE_KINDS.index(work.kind), work))
            timed.sort()
            fused = {work for (where, work), choice in self._fused.items() if where == rank and solver.value(choice)}
            weights = {work._replace(kind=Kind.W) for work in fused}
            row = (item[-1] for item in timed)
            rows.append(tuple(w._replace(kind=Kind.BW) if w in fused else w for w in row if w not in weights))
        return replace(self._empty, passes=tuple(rows))


def _whole_seconds(each: list[Costs]) -> tuple[Fraction, list[Costs]]:
    """The costs with times in whole multiples of a unit, and the unit in seconds; never longer than they were."""
    names = [kind.row.seconds for kind in STAGE_KINDS]
    stages = {stage: None for costs in each for stage in costs.stages}
    times = {stage: {name: time for name in names if (time := getattr(stage, name)) is not None} for stage in stages}
    given = list(chain(*(by_name.values() for by_name in times.values())))
    coarse = Fraction(max(filter(None, given), default=1)) / 20000
    given += [costs.hop for costs in each]
    given += [link.seconds + link.latency for costs in each for link in costs.links]
    unit, whole = _whole(given, coarse)
    counts = dict(zip(given, whole, strict=True))
    without: dict[str, Any] = dict.fromkeys(PARTS)
    made = {
        stage: replace(stage, **({name: counts[time] for name, time in by_name.items()} | without))
        for stage, by_name in times.items()
    }
    links = [
        tuple(link._replace(seconds=counts[link.seconds + link.latency], latency=0) for link in costs.links) for costs in each
    ]
    return unit, [
        Costs(tuple(made[stage] for stage in costs.stages), counts[costs.hop], links=own)
        for costs, own in zip(each, links, strict=True)
    ]


def _slowest(costs: Costs) -> float:
    return max([costs.hop, *(link.seconds for link in costs.links)])


def _whole(values: Iterable[float], coarse: Fraction) -> tuple[Fraction, list[int]]:
    """A unit and the values as multiples of it: exact where their denominators are small, else rounded down to ``coarse``."""
    given = [Fraction(value) for value in values]
    simple = [value.limit_denominator(1000) for value in given]
    unit = Fraction(1, math.lcm(*(value.denominator for value in simple)))
    if unit * 10**6 < 1 or any(abs(rough - value) > value / 10**12 for rough, value in zip(simple, given, strict=True)):
        return coarse, [int(value / coarse) for value in given]
    return unit, [int(value / unit) for value in simple]
