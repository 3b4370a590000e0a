"""A problem as the arrays of the compiled planner, and its orders converted back into passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import numpy as np

from megatron.pipeline.planner.schedule.core.kinds import stage_kinds
from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.search import engine
from megatron.pipeline.planner.schedule.time.orders import KINDS, POST, UP, Array, BusyLinks, hops_of, replay, slots


@dataclass(frozen=True)
class Plan:
    """An order of passes with its times.

    Attributes:
        value: the objective, in seconds: span or makespan.
        order: int[P, N, 3]: (kind, stage, microbatch) of every rank's passes, padded with -1.
        ends: float[5, S, M].
        hops: float[5, S, M], with what messages stand in line.
    """

    value: float
    span: float
    makespan: float
    order: Array
    ends: Array
    hops: Array


@dataclass
class Few:
    """The shortest of some plans.

    Attributes:
        most: as many at most.
        near: none that is more than this many times as long as the shortest.
        limit: none that is longer.
    """

    most: int
    near: float
    limit: float
    plans: list[Plan] = field(default_factory=list)

    def longest(self) -> float:
        """The value above which another plan is of no use."""
        values = [plan.value for plan in self.plans]
        return min([self.limit, *(self.near * value for value in values[:1]), *values[self.most - 1 :]])

    def add(self, plans: Iterable[Plan | None]) -> None:
        for plan in plans:
            if plan is not None and plan.value <= self.longest():
                self.plans = sorted([*self.plans, plan], key=attrgetter("value"))[: self.most]
                self.plans = [each for each in self.plans if each.value <= self.longest()]


class Instance:
    """The arrays of a problem, read forwards or backwards in time; see ``engine`` for their meaning.

    Attributes:
        arrays: all of them, as the compiled loops take them.
        mean_seconds, mean_hops, mean_allocated: float[5, S], means over microbatches.
        begins: float[M], how many mean microbatches are before each.
    """

    def __init__(self, problem: Problem, backwards: bool = False) -> None:
        self.problem, self.backwards = problem, backwards
        placement, stages = problem.placement, range(problem.placement.depth)
        self.home = home = np.array([placement.home(stage)[0] for stage in stages])
        unequal, many = bool(problem.costs.loads), problem.microbatches
        costs = problem.costs.different(many)
        costs = costs[::-1] if backwards else costs
        self.seconds, self.allocated = np.zeros((2, *self.shape))
        self.before = np.full((KINDS, len(stages)), -2)
        slot_of = slots(backwards)
        for stage in stages:
            recomputed = stage in problem.recompute
            kinds = stage_kinds(recomputed, stage in problem.fused)
            last = -1
            for kind in reversed(kinds) if backwards else kinds:
                slot = slot_of[kind]
                self.seconds[slot, stage] = [cost.stages[stage].seconds(kind) for cost in costs]
                allocated = [cost.stages[stage].allocated(kind, recomputed) for cost in costs]
                self.allocated[slot, stage] = np.array(allocated, float) * (-1 if backwards else 1)
                self.before[slot, stage] = last
                last = slot
        self.hops, self.waits = hops_of(placement, costs, many, backwards), BusyLinks.between(placement, costs, many, backwards)
        together = np.zeros((KINDS, len(stages), many + 1))
        if unequal:
            np.cumsum(self.allocated, axis=2, out=together[:, :, 1:])
            self.mean_seconds, self.mean_allocated, self.mean_hops = (
                each.sum(axis=2) / many for each in (self.seconds, self.allocated, self.hops)
            )
            each = self.seconds.sum(axis=(0, 1))
            self.begins = (each.cumsum() - each) / (each.mean() or 1.0)
        else:
            self.mean_seconds, self.mean_allocated, self.mean_hops = (
                self.seconds[:, :, 0],
                self.allocated[:, :, 0],
                self.hops[:, :, 0],
            )
            together += self.mean_allocated[:, :, None] * np.arange(many + 1)
            self.begins = np.arange(many)
        self.lengths = np.zeros(placement.ranks, np.int64)
        np.add.at(self.lengths, home, (self.before != -2).sum(axis=0) * many)
        stage_of, kind_of = np.nonzero((self.before != -2).T)
        by_rank = np.argsort(home[stage_of], kind="stable")
        lines = np.stack((kind_of, stage_of), axis=1)[by_rank]
        first = np.searchsorted(home[stage_of][by_rank], np.arange(placement.ranks + 1))
        self.arrays = engine.Arrays(
            home, self.hops, self.waits, self.seconds, self.before, self.allocated, together, self.lengths, lines, first
        )

    @cached_property
    def reversed(self) -> Instance:
        """The same problem, read in the other direction of time."""
        return Instance(self.problem, not self.backwards)

    @property
    def is_v(self) -> bool:
        """Tell whether rank r has the stages r and 2p-1-r of the model."""
        ranks = range(len(self.lengths))
        return self.home.tolist() == [*ranks, *reversed(ranks)]

    @property
    def size(self) -> int:
        """Number of passes."""
        return int(self.lengths.sum())

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of arrays over all passes: kinds, stages, microbatches."""
        return KINDS, len(self.home), self.problem.microbatches

    def construct(self, policy: engine.Preferences, limits: Array, longest: float = np.inf) -> Plan | None:
        """List scheduling; None if the limits leave no room for one microbatch.

        Args:
            longest: a plan of a higher value is not finished, and its value is infinite.
        """
        any_number = np.full(len(self.home), 2**31)
        policy = policy._replace(
            targets=np.ascontiguousarray(policy.targets, float),
            caps=any_number if policy.caps is None else policy.caps,
            quotas=any_number if policy.quotas is None else policy.quotas,
        )
        placed = engine.PlacedPasses.none(self.arrays, self._spare(longest))
        hops, waits = self.waits.fresh(self.hops)
        arrays = self.arrays._replace(hops=hops, waits=waits)
        found = engine.construct(arrays, limits, policy, placed, self.problem.objective is Objective.MAKESPAN)
        if found < 0:
            return Plan(np.inf, np.inf, np.inf, placed.order, placed.ends, hops)
        return self.replay(placed.order) if found else None

    def _spare(self, longest: float) -> Array:
        """For how many seconds each rank can be idle in a plan of a value, float[P]."""
        if self.backwards:
            longest = np.inf
        return longest * (1 + 1000 * SLACK) - self.work

    @cached_property
    def work(self) -> Array:
        """Seconds of all passes of every rank, float[P]."""
        work = np.zeros(len(self.lengths))
        np.add.at(work, self.home, self.mean_seconds.sum(axis=0) * self.shape[2])
        return work

    def replay(self, order: Array) -> Plan | None:
        """The earliest times of an order; None if it cannot finish."""
        ends = np.empty(self.shape)
        hops, waits = self.waits.fresh(self.hops)
        span, makespan = replay(order, self.lengths, self.seconds, self.before, ends, hops, waits)
        if span < 0:
            return None
        return Plan(span if self.problem.objective is Objective.SPAN else makespan, span, makespan, order, ends, hops)

    def sorted(self, targets: Array) -> Plan | None:
        """Every rank runs its passes in the order of their targets, without regard to memory; None if they cannot finish."""
        kind, stage, index = np.unravel_index(self.numbers, self.shape)
        by_rank = np.lexsort((targets[kind, stage, index], self.home[stage]))
        order = np.full((len(self.lengths), int(self.lengths.max()), 3), -1, np.int32)
        order[np.arange(order.shape[1]) < self.lengths[:, None]] = np.stack((kind, stage, index), axis=1)[by_rank]
        return self.replay(order)

    @cached_property
    def numbers(self) -> Array:
        """All passes, int[N]: the places of their times in an array of all, flat."""
        return np.flatnonzero(np.broadcast_to((self.before != -2)[:, :, None], self.shape))

    def within(self, plan: Plan, limits: Array) -> bool:
        """Tell whether no rank of a plan ever holds more than its limit."""
        kind, stage, index = np.moveaxis(plan.order, 2, 0)
        held = np.where(kind < 0, 0.0, self.allocated[kind, stage, index]).cumsum(axis=1).max(axis=1, initial=0.0)
        return bool((held <= limits * (1 + SLACK)).all())

    def read(self, passes: Order) -> Plan | None:
        """A plan from passes; None if they cannot finish, or are not the passes of the problem."""
        slot_of, placement = slots(self.backwards), self.problem.placement
        order = np.full((len(passes), int(self.lengths.max()), 3), -1, np.int32)
        for rank, row in enumerate(passes):
            if len(row) != self.lengths[rank]:
                return None
            stages = placement.stages[rank]
            order[rank, : len(row)] = [(slot_of[kind], stages[chunk], microbatch) for kind, microbatch, chunk in row]
        return self.replay(order)

    def turned(self, order: Array) -> Array:
        """An order of the reversed instance as one of this one."""
        place = self.lengths[:, None] - 1 - np.arange(order.shape[1])
        turned = order[np.arange(len(order))[:, None], place]
        turned[:, :, 0] = POST - turned[:, :, 0]
        turned[:, :, 2] = self.shape[2] - 1 - turned[:, :, 2]
        turned[place < 0] = -1
        return turned

    def passes(self, plan: Plan) -> Order:
        """The passes of every rank."""
        placement, fused = self.problem.placement, self.problem.fused
        names = {slot: kind for kind, slot in slots(self.backwards).items() if kind is not Kind.BW}
        lines = {
            (slot, stage): (Kind.BW if slot == UP and stage in fused else kind, placement.home(stage)[1])
            for slot, kind in names.items()
            for stage in range(placement.depth)
        }
        return tuple(
            tuple(Pass(kind, index, chunk) for slot, stage, index in row[:length] for kind, chunk in (lines[slot, stage],))
            for row, length in zip(plan.order.tolist(), self.lengths.tolist(), strict=True)
        )
