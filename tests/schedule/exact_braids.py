"""The constraint model with braids: a choice for every pair of a forward and a backward on a rank, whether they run as one."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from schedule.exact import Model

from megatron.pipeline.planner.schedule.core.kinds import BRAIDED
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntervalVar, IntVar, LinearExprT


class _Way(NamedTuple):
    """How a backward may run other than alone as B.

    Attributes:
        kind: FB, FBW, or BW alone.
        beside: the forward that it runs with, if any.
        length, output: in whole units; the second until the output of the forward is there.
        chosen: whether it runs so.
    """

    kind: Kind
    beside: Pass | None
    length: int
    output: int
    chosen: IntVar


class ModelWithBraids(Model):
    """In a braid the backward begins with its forward and ends with it, and only the forward occupies the rank."""

    def __init__(self, problem: Problem) -> None:
        self._ways_of: dict[tuple[int, Pass], list[_Way]] = {}  # by rank and backward
        self._outputs: dict[tuple[int, Pass], IntVar] = {}  # by rank and forward: when what it makes is there
        super().__init__(problem)

    def _add_passes(self, rank: int, works: list[Pass]) -> None:
        model, forwards = self._model, [work for work in works if work.kind is Kind.F]
        ways = {work: self._ways(rank, work, forwards) for work in works if work.kind in BRAIDED}
        self._ways_of |= {(rank, work): each for work, each in ways.items()}
        intervals: list[IntervalVar] = []
        for work in works:
            self._starts[rank, work] = model.new_int_var(0, self._horizon, f"{work}@{rank}")
            self._ends[rank, work] = model.new_int_var(0, self._horizon, f"end {work}@{rank}")
        for work in works:
            start, end, length = self._starts[rank, work], self._ends[rank, work], self._length(rank, work)
            if work.kind is Kind.F:
                beside = [way for each in ways.values() for way in each if way.beside == work]
                model.add_at_most_one(way.chosen for way in beside)
                size = length + sum((way.length - length) * way.chosen for way in beside)
                seconds = model.new_int_var(0, self._horizon, "")
                model.add(seconds == size)
                intervals.append(model.new_interval_var(start, seconds, end, f"[{work}@{rank}]"))
                output = self._outputs[rank, work] = model.new_int_var(0, self._horizon, "")
                model.add(output == start + length + sum((way.output - length) * way.chosen for way in beside))
                continue
            others = ways.get(work, [])
            if work.kind is Kind.W:
                others = [way for way in ways[backward_of(work)] if way.kind.finishes_weights]
            alone = model.new_bool_var("")
            model.add_exactly_one(alone, *(way.chosen for way in others))
            intervals.append(model.new_optional_interval_var(start, length, start + length, alone, f"[{work}@{rank}]"))
            model.add(end == start + length).only_enforce_if(alone)
            for way in others:
                if work.kind is Kind.W:
                    moment = self._ends[rank, backward_of(work)]
                    model.add(start == moment).only_enforce_if(way.chosen)
                    model.add(end == moment).only_enforce_if(way.chosen)
                elif way.beside:
                    model.add(start == self._starts[rank, way.beside]).only_enforce_if(way.chosen)
                    model.add(end == self._ends[rank, way.beside]).only_enforce_if(way.chosen)
                else:
                    model.add(end == start + way.length).only_enforce_if(way.chosen)
                    intervals.append(model.new_optional_interval_var(start, way.length, start + way.length, way.chosen, "fused"))
        model.add_no_overlap(intervals)

    def _ways(self, rank: int, backward: Pass, forwards: list[Pass]) -> list[_Way]:
        stages, costs = self._problem.placement.stages[rank], self._problem.costs
        stage = stages[backward.chunk]
        seconds: list[tuple[Kind, Pass | None, tuple[float, float]]] = []
        if backward.kind is Kind.B:
            seconds.append((Kind.BW, None, (0, costs.seconds(Kind.BW, stage))))
        for forward, kind in product(forwards, dict.fromkeys((backward.kind, Kind.BW))):
            if forward[1:3] != backward[1:3]:
                braided = BRAIDED[kind]
                seconds.append((braided, forward, costs.braid(stages[forward.chunk], braided, stage)))

        def whole(time: float) -> int:
            return math.floor(Fraction(time) / self.unit + Fraction(1, 10**9))

        return [
            _Way(kind, beside, whole(sum(times)), whole(times[0]), self._model.new_bool_var(""))
            for kind, beside, times in seconds
        ]

    def _made(self, rank: int, work: Pass) -> LinearExprT:
        return self._outputs[rank, work] if work.kind is Kind.F else super()._made(rank, work)

    def _least(self) -> float:
        return float(Fraction(lower_bound(self._problem)) / self.unit)

    def start_from(self, hint: Schedule) -> None:
        super().start_from(hint)
        for rank, row in enumerate(hint.rows):
            braids = {(after.kind, after[1:3]): work for work, after in row.braids()}
            for (at, backward), ways in self._ways_of.items():
                for way in ways:
                    if at == rank and way.beside:
                        self._model.add_hint(way.chosen, braids.get((way.kind, backward[1:3])) == way.beside)

    def schedule(self, solver: CpSolver) -> Schedule:
        base = super().schedule(solver)
        rows = []
        for rank, passes in enumerate(base.passes):
            chosen = {
                backward: way
                for (at, backward), ways in self._ways_of.items()
                for way in ways
                if at == rank and solver.value(way.chosen)
            }
            beside = {way.beside: backward._replace(kind=way.kind) for backward, way in chosen.items() if way.beside}
            finished = {backward._replace(kind=Kind.W) for backward, way in chosen.items() if way.kind.finishes_weights}
            row: list[Pass] = []
            for work in passes:
                if work in finished or (work in chosen and chosen[work].beside):
                    continue
                row.append(work._replace(kind=chosen[work].kind) if work in chosen else work)
                if work in beside:
                    row.append(beside[work])
            rows.append(tuple(row))
        return Schedule(base.name, base.placement, base.microbatches, tuple(rows), base.splits)


def backward_of(weights: Pass) -> Pass:
    """The B whose weights' gradients a W computes."""
    return weights._replace(kind=Kind.B)
