"""The planner: rounds and list scheduling, then improvement from both ends of time, at every memory level."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from megatron.pipeline.planner.schedule.core.passes import Order
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, Problem
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.rules.verify import rounded_up
from megatron.pipeline.planner.schedule.search.compact import compact
from megatron.pipeline.planner.schedule.search.engine import Preferences
from megatron.pipeline.planner.schedule.search.instance import Few, Instance, Plan
from megatron.pipeline.planner.schedule.search.rounds import can_be_in_rounds, rounds
from megatron.pipeline.planner.schedule.search.seeds import period_and_unit, starts
from megatron.pipeline.planner.schedule.time.orders import DOWN, Array

Known: TypeAlias = Callable[[Problem], Iterable[Order]]
_value = attrgetter("value")

# Budgets count passes, not seconds, so that every rank and every machine makes the same plan.
_PASSES, _PASSES_OF_LONG = 800_000, 600_000  # passes placed in the search of one memory level
_FEWEST, _MOST = 16, 800  # plans made for one memory level
# Plans to begin with: tried first; compacted, the best of these; improved, the best of those.
_GLANCE, _SQUEEZED, _STARTS = 12, 6, 3
_STEPS, _STEPS_OF_LONG = 64, 16  # levels up to the memory of 1F1B at most
_MEDIUM, _THOROUGH = 1_000, 4  # passes above which only this many of them are searched thoroughly where there are rounds
_TRIES_AT_ONCE = 16  # to improve the first plan for unequal microbatches, where a plan is wanted at once
_PROBES = 4  # plans that tell whether a level of a long problem is worth a search
_WHOLE = 10_000  # passes above which a problem is first planned with fewer microbatches:
_MANY = 2_500  # passes above which plans are first made in rounds
_MOST_IN_ROUNDS = 60_000  # passes above which nothing is tried beside rounds, where there are any
_HUGE = 300_000  # passes above which nothing is tried but a few plans at full length
_ROUNDS = 3  # with this many per rank, enough to find its two ends and how its middle repeats
_BLOCKS = (1, 2, 3, 4, 6)  # microbatches after which the middle may repeat
_NEAR = 1.02  # a plan up to this many times as long as the best is compacted, and at first also improved further
_NEAR_OF_LONG = 1.04  # the same in a long problem before a plan is compacted
_CLOSE = 1.005  # a plan of full length up to this many times as long as the bound ends the search of a long problem's level
_DOMINATED = 1.01  # a level whose best start is this many times as long as another level's plan is not searched further
_KEPT = 64  # levels whose plans are cached, so that trying several limits searches each level once


def search(problem: Problem, known: Known, fixed: bool = False) -> Order:
    """The best order that the search finds; never worse than a known order that fits into the limits.

    A higher limit does not make the order longer: levels of memory below the limit are searched too, unless their lower bound
    says that they cannot be better.

    Args:
        known: from a problem to orders of it to begin with; they need not fit into its limits.
        fixed: whether the problem comes with no other limits: a long one is then searched within its own limits only.

    Raises:
        ValueError: a limit leaves no room for one microbatch.
    """
    for rank in range(problem.ranks):
        least = problem.microbatch_memory(rank)
        if problem.limits is not None and problem.limits[rank] < least * (1 - SLACK):
            raise LimitTooLow(
                f"rank {rank}: a memory limit of {problem.limits[rank]:g} is less than the {least:g} that one microbatch needs "
                f"there; give at least {rounded_up(least)}",
                max(map(problem.microbatch_memory, range(problem.ranks))),
            )
    unlimited = replace(problem, limits=None, quick=False)
    if problem.quick and (plan := _first(*_read(unlimited, known), problem.limits)) is not None:
        return _read(unlimited, known)[0].passes(plan)
    short = _cut_down(unlimited)
    whole, plans = _read(unlimited, known)
    long = short is not unlimited or whole.size > _HUGE
    best = min(_fitting(whole, plans, next(_levels(whole, problem.limits, long, fixed))[0]), key=_value, default=None)
    at_length = _Long(whole)
    for limits, thorough in _levels(whole, problem.limits, long, fixed):
        goal = _goal(problem, tuple(limits.tolist()))
        if best is not None and goal >= best.value:
            break  # levels with less memory cannot be better either
        level = _level(short, known, tuple(limits.tolist()), long)
        for plan in at_length.candidates(level, limits, best, goal, thorough) if long else level.candidates(best, thorough):
            if best is None or plan.value < best.value * (1 - SLACK):
                best = plan
            if best.value <= goal:
                break
    assert best is not None, "every limit has room for one microbatch, and so for all of them in turn"
    return whole.passes(best)


def _first(instance: Instance, known: list[Plan], own: Sequence[float] | None) -> Plan | None:
    """The best of the few plans that are made first, compacted; and a little improved where microbatches are unequal, for which
    none of these is made."""
    room = _room(instance, own)
    made = [*_fitting(instance, known, room), *rounds(instance, room, few=True)]
    made += itertools.islice(starts(instance, room, _PROBES), _PROBES)
    best = min(made, key=_value, default=None)
    tries = _TRIES_AT_ONCE if len(set(instance.problem.costs.loads)) > 1 else 0
    return best and _improve(instance, compact(instance, best, room), room, tries, goal=0.0)


def _levels(instance: Instance, own: Sequence[float] | None, long: bool, fixed: bool) -> Iterator[tuple[Array, bool]]:
    """Limits of all ranks: their own, then lower and lower ones, and whether to search them thoroughly.

    They do not depend on the limit above them, so that a higher limit adds some and removes none. If all stages hold the
    same, limits are rounded down to whole chunks, and those of a long problem to whole steps.
    """
    problem = instance.problem
    most = _room(instance, own)
    microbatch = max(problem.microbatch_memory(rank) for rank in range(problem.ranks))
    chunk = microbatch / problem.placement.chunks
    if (long and fixed) or not chunk:
        yield most, True
        return
    in_rounds = instance.size > _MEDIUM and can_be_in_rounds(instance)
    steps = _STEPS_OF_LONG if long and not in_rounds else _STEPS
    step = chunk * max(1, problem.placement.depth // steps)
    sizes = {size for stage in problem.costs.stages for size in (stage.activation, stage.retained, stage.checkpoint)}
    unit = step if long else chunk
    whole = not problem.costs.loads and sizes <= {0.0, chunk} and min(most) >= max(unit, microbatch)
    if whole:
        most = _whole_units(most, unit)
    thorough = problem.ranks * microbatch * np.arange(1, 3 * _THOROUGH + 1) / _THOROUGH if in_rounds else np.zeros(0)
    thorough = _whole_units(thorough, unit) if whole else thorough
    levels = np.append(step * np.arange(1, round(3 * problem.ranks * microbatch / step) + 1), thorough)
    least_of_rounds = problem.ranks * microbatch * (1 - SLACK)  # with less, rounds are seldom the best way

    def is_thorough(level: float) -> bool:
        return not in_rounds or level < least_of_rounds or bool(np.isclose(thorough, level, SLACK).any())

    yield most, fixed or min(most) < max(most) or is_thorough(max(most))
    for level in sorted({float(level) for level in levels}, reverse=True):
        if microbatch * (1 - SLACK) <= level < max(most) * (1 - SLACK):
            yield np.minimum(most, level), is_thorough(level)


def _goal(problem: Problem, limits: tuple[float, ...]) -> float:
    """A value that no plan within the limits can improve on."""
    return lower_bound(replace(problem, limits=limits)) * (1 + SLACK)


def _whole_units(amounts: Array, unit: float) -> Array:
    return np.floor(amounts / unit * (1 + SLACK)) * unit


def _room(instance: Instance, limits: ArrayLike | None) -> Array:
    """The memory that every rank can use: its limit if it has one, or what all microbatches hold at once if that is less."""
    everything = np.zeros(len(instance.lengths))
    held = np.maximum(instance.mean_allocated, 0).sum(axis=0)
    np.add.at(everything, instance.home, held * instance.shape[2])
    return np.minimum(everything, np.inf if limits is None else limits)


@lru_cache(maxsize=4)
def _read(problem: Problem, known: Known) -> tuple[Instance, list[Plan]]:
    """The arrays of a problem, and its known orders as plans."""
    instance = Instance(problem)
    plans = map(instance.read, known(problem))
    return instance, [plan for plan in plans if plan is not None]


def _fitting(instance: Instance, plans: Iterable[Plan], limits: Array) -> list[Plan]:
    return [plan for plan in plans if instance.within(plan, limits)]


@dataclass(frozen=True)
class _Level:
    """The plans found within some limits, made when they are first used.

    Attributes:
        known: plans to begin with; they need not fit into the limits.
        long: whether this is a part of a longer problem.
    """

    instance: Instance
    known: list[Plan]
    limits: tuple[float, ...]
    long: bool = False

    def candidates(self, best: Plan | None, thorough: bool) -> Iterator[Plan]:
        """Better and better plans; only a few where the best known plan shows that others would hardly be better."""
        rounds_first = self.instance.size > _MANY  # they are the faster way to a good plan where there are many passes
        if rounds_first:
            yield from self.in_rounds
        longest = best.value * _DOMINATED if best else np.inf
        if (thorough or not self.in_rounds) and self.begin and self.begin[0].value <= longest:
            yield from self.plans
        if not rounds_first:
            yield from self.in_rounds

    @cached_property
    def in_rounds(self) -> list[Plan]:
        """The best plan that is made in rounds, compacted and improved, if there is one."""
        instance, room = self.instance, self._room
        shortest = sorted(rounds(instance, room), key=_value)[:1]
        return [_improve(instance, compact(instance, plan, room), room, self._tries, self._goal) for plan in shortest]

    @cached_property
    def begin(self) -> list[Plan]:
        """The plans to begin with, the best first; empty if none fits."""
        near, known = (_NEAR_OF_LONG, self.in_rounds) if self.long else (np.inf, [])
        few = Few(_SQUEEZED, near, near * min((plan.value for plan in known), default=np.inf))
        return _begin(self.instance, self.known, self._room, self.budget // 2, self._goal, few)

    @cached_property
    def plans(self) -> list[Plan]:
        """The plans to begin with, improved; the best first. Of a part of a longer problem only those that are near the best."""
        known = [*self.begin[:1], *self.in_rounds] if self.long else []
        longest = _DOMINATED * min((plan.value for plan in known), default=np.inf)
        near = [plan for plan in self.begin if plan.value <= longest]
        return sorted(_each(near, lambda plan: _improve(self.instance, plan, self._room, self._tries, self._goal)), key=_value)

    @property
    def budget(self) -> int:
        """The number of plans to be made."""
        passes = _PASSES_OF_LONG if self.long else _PASSES
        return int(min(_MOST, max(_FEWEST, passes / self.instance.size)))

    @property
    def _tries(self) -> int:
        """The number of plans to be made from each of those to begin with."""
        return self.budget // 2 // _STARTS

    @cached_property
    def _goal(self) -> float:
        return _goal(self.instance.problem, self.limits)

    @property
    def _room(self) -> Array:
        return _room(self.instance, self.limits)


@lru_cache(maxsize=_KEPT)
def _level(problem: Problem, known: Known, limits: tuple[float, ...], long: bool) -> _Level:
    """Plans of a problem without limits of its own, within these limits."""
    return _Level(*_read(problem, known), limits, long)


class _Long:
    """The search of a long problem: at full length where plans can be made in rounds, else from plans for fewer microbatches."""

    def __init__(self, whole: Instance) -> None:
        self._whole = whole
        self._in_rounds = False  # whether a level had plans made in rounds; levels below are searched for better ones only

    def candidates(self, level: _Level, limits: Array, best: Plan | None, goal: float, thorough: bool) -> Iterator[Plan]:
        """Better and better plans of a level; none where the best known plan shows that they would hardly be better."""
        whole, room = self._whole, _room(self._whole, limits)
        most = goal * _NEAR if whole.size <= _HUGE else np.inf
        quick = [plan for plan in starts(whole, room, 0, lambda: most) if plan.value <= most] if can_be_in_rounds(whole) else []
        longest = min((plan.span for plan in (*quick, *([best] if best else []))), default=np.inf)
        made = list(rounds(whole, room, longest * _DOMINATED, few=True))
        self._in_rounds = self._in_rounds or bool(made)
        if not (quick or made) and whole.size > _HUGE:
            quick = [*starts(whole, room, _PROBES)]
        for plan in sorted([*quick, *made], key=_value)[:1]:
            if best is None or plan.value <= best.value * _DOMINATED:
                compacted = compact(whole, plan, room)
                best = compacted if best is None else min(best, compacted, key=_value)
                yield compacted
                if compacted.value <= goal * _CLOSE:
                    return
        if whole.size <= (_MOST_IN_ROUNDS if self._in_rounds else _HUGE) and (thorough or not self._in_rounds):
            yield from _extended(whole, level, room, best)


def _extended(whole: Instance, level: _Level, room: Array, best: Plan | None) -> Iterator[Plan]:
    """The best plan of a level for fewer microbatches, with its middle repeated; none if the level is dominated."""
    small = level.instance
    more = (whole.problem.microbatches - small.problem.microbatches) * period_and_unit(small)[0]
    known = best.value if best else np.inf
    near = known * _NEAR_OF_LONG
    if best is not None and not level.in_rounds:
        glance = itertools.islice(starts(small, _room(small, level.limits), _PROBES, lambda: near - more), _PROBES)
        if min((plan.value for plan in glance), default=np.inf) + more > near:
            return
    if min((plan.value for plan in (*level.in_rounds, *level.begin)), default=np.inf) + more > known * _DOMINATED:
        return
    few = Few(max(1, min(_STARTS, level.budget // _FEWEST)), _NEAR_OF_LONG, near)
    if not level.in_rounds:
        few.add(starts(whole, room, max(2, level.budget // 16), few.longest))
    for plan in sorted(_distinct([*level.in_rounds, *level.plans]), key=_value)[:2]:
        for block in _BLOCKS:
            targets = _repeated(small, plan, whole, block)
            exact = whole.sorted(targets)
            few.add([exact] if exact and whole.within(exact, room) else [])
            few.add(whole.construct(Preferences(targets, in_order=in_order), room, few.longest()) for in_order in (True, False))
    yield from (compact(whole, plan, room) for plan in _distinct(few.plans))


def _distinct(plans: Iterable[Plan]) -> list[Plan]:
    """The plans without those whose order another one has."""
    return list({plan.order.tobytes(): plan for plan in plans}.values())


def _each(plans: list[Plan], change: Callable[[Plan], Plan]) -> list[Plan]:
    """All plans, changed; those that have one order are changed once."""
    changed = {plan.order.tobytes(): change(plan) for plan in _distinct(plans)}
    return [changed[plan.order.tobytes()] for plan in plans]


def _begin(instance: Instance, known: list[Plan], limits: Array, most: int, goal: float, few: Few) -> list[Plan]:
    """The best plans to begin with, compacted, the best first; only that one if it reaches the goal.

    Args:
        few: those that are compacted, none yet.
    """
    best = list[Plan]()
    plans = itertools.chain(_fitting(instance, known, limits), starts(instance, limits, most, few.longest))
    for number in (_GLANCE, most):  # the first few are often enough
        few.plans = []
        few.add(itertools.islice(plans, number))
        best = sorted([*best, *_each(few.plans, lambda plan: compact(instance, plan, limits))], key=_value)[:_STARTS]
        if best and best[0].value <= goal:
            return best[:1]
    return best


def _cut_down(problem: Problem) -> Problem:
    """A long problem with fewer microbatches, enough that its start and its end do not overlap; one that is short, or has no
    middle that repeats, as it is."""
    enough = _ROUNDS * problem.ranks + 8
    long = not problem.costs.loads and 3 * problem.microbatches * problem.placement.depth > _WHOLE
    return replace(problem, microbatches=enough) if long and problem.microbatches > enough + problem.ranks else problem


def _repeated(small: Instance, plan: Plan, whole: Instance, block: int) -> Array:
    """The times of a plan as targets for more microbatches: the ``block`` microbatches in its middle are repeated."""
    begin = plan.ends - small.seconds
    few, many = small.shape[2], whole.shape[2]
    first = (few - block) // 2
    period = (begin[DOWN, 0, first + block] - begin[DOWN, 0, first]) / block
    index = np.arange(many)
    source = np.where(index < first, index, first + (index - first) % block)
    source = np.where(index >= many - (few - first - block), index - (many - few), source)
    return begin[:, :, source] + (index - source) * period


def _improve(instance: Instance, plan: Plan, limits: Array, tries: int, goal: float) -> Plan:
    """Plan repeatedly, forwards and backwards in time, each time with the times of the current plan as targets, some perturbed.

    Forward-backward improvement (Tormos and Lova, "A competitive heuristic solution technique for resource-constrained
    project scheduling", 2001): planned from the end, every pass that can run late does, which leaves room for the others.
    """
    generator = np.random.default_rng(0)
    backwards = instance.reversed
    period, unit = period_and_unit(instance)
    best = current = plan
    for number in range(tries if best.value > goal else 0):
        begin = current.ends - instance.seconds
        window = (0.0, 0.3, 0.6)[generator.integers(3)] * unit
        in_order = bool(generator.integers(2))
        noise = np.zeros(instance.shape) if number < 2 else _noise(generator, instance.shape, period)
        if number % 2:
            new = instance.construct(Preferences(begin + noise, window=window, in_order=in_order), limits, best.value * _NEAR)
        else:
            targets = (current.makespan - current.ends)[::-1, :, ::-1]
            turned = backwards.construct(Preferences(targets + noise, window=window, in_order=in_order), limits)
            new = instance.replay(instance.turned(turned.order)) if turned else None
        if new is None or new.value > best.value * _NEAR:
            continue
        new = compact(instance, new, limits)
        if new.value <= best.value * (1 + (_NEAR - 1) * (1 - number / tries)):
            current = new  # at first also a slightly worse plan, to leave a local optimum
        if new.value <= best.value * (1 + SLACK):
            best = new
            if best.value <= goal:
                break
    return best


def _noise(generator: np.random.Generator, shape: tuple[int, int, int], period: float) -> Array:
    """Random noise on a small share of the targets."""
    share = (0.02, 0.05, 0.15)[generator.integers(3)]
    scale = (0.2, 0.5, 1.0)[generator.integers(3)] * period
    return generator.normal(size=shape) * scale * (generator.random(shape) < share)
