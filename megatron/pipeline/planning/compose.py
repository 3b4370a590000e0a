"""From a problem to a schedule within its limits: a family's order, then recomputation, the vocabulary's passes, and copies.

``solve`` is the whole composition, and the only place that checks a schedule against memory limits while it is made. The
vocabulary needs memory that the family does not count, and offloading frees some: both plan the family for other limits, and
offloading searches for the best of these where the family plans for any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from megatron.pipeline.planning.limits import kept_limits, largest_microbatch, least_limits, logits, of_stages, spreading
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core import placement
from megatron.pipeline.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.schedule.core.problem import LimitTooLow, Problem
from megatron.pipeline.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.schedule.optimum.bound import least_limit
from megatron.pipeline.schedule.rules.verify import memory_stays_within, rounded_up, verify
from megatron.pipeline.schedule.search.paired import paired
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.schedule.transforms.braid import braid, combined
from megatron.pipeline.schedule.transforms.join import join, saves, split
from megatron.pipeline.schedule.transforms.offload import offload
from megatron.pipeline.schedule.transforms.vocabulary import postpone, postponed, spread

_NEAR = 1.01  # as short: the schedule that holds less is better then
_TIMES = (12, 8, 6, 4, 3, 2, 1.5, 1)  # a schedule's own memory, over what offloading leaves of it on the device
_HALVINGS = 2  # of the step between two of them


def solve(name: str, problem: Problem) -> Schedule:
    """The schedule of a family for a problem on its placement; where the problem allows braids, never longer than without.

    Where BW takes or holds less than B and W, backwards are fused one by one as far as that makes the schedule shorter, unless
    the problem says which are; it is never longer than with all of them fused.

    Raises:
        LimitTooLow: the schedule would hold more than the limits.
        HostLimitTooLow: the limit of host memory has no room for one copy.
    """
    if problem.overlap and problem.quick:
        return solve(name, replace(problem, overlap=False))
    if problem.overlap:
        own = solve(name, alone := replace(problem, overlap=False))
        found = [braid(own, problem), *_of_braids(name, alone, own)]
        return min(found, key=lambda schedule: problem.value(simulate(schedule, problem.costs)))
    if problem.offload:
        return _offloaded(name, problem, problem.offload)
    if problem.vocabulary:
        return _spread(name, problem, problem.vocabulary)
    cheaper = frozenset(stage for stage, cost in enumerate(problem.costs.stages) if saves(cost) or cost.grows)
    if families.named(name).fused or problem.fused or not cheaper:
        return _within(of_stages(name, problem), problem)
    found, refused = [], []
    for fused in (frozenset[int](), cheaper):
        try:
            schedule = _within(of_stages(name, replace(problem, fused=fused)), problem)
            tried = schedule if fused or problem.quick else join(schedule, problem)
            found.append(tried if problem.quick else split(tried, problem))
        except LimitTooLow as error:
            refused.append(error)
    if not found:
        raise min(refused, key=lambda error: error.least)
    return min(found, key=lambda schedule: problem.value(simulate(schedule, problem.costs)))


def _of_braids(name: str, problem: Problem, own: Schedule) -> Iterator[Schedule]:
    """Schedules that are made for braids, of those that keep to the limits.

    A family that searches is asked for an order as if all communication of layers were hidden, and one is made of braids from the
    start; on a V there is DualPipeV's. Where all backwards are fused, as in interleaved, there is megatron-core's combined order.
    """
    plain = not (problem.offload or problem.vocabulary or problem.recompute)
    others = [more] if (more := combined(own)) is not None else []
    if families.named(name).searches and plain:
        if (hidden := problem.costs.hidden()) != problem.costs:
            yield braid(solve(name, replace(problem, costs=hidden)), problem)
        if families.named(name).memory and (order := paired(problem)) is not None:
            others.append(replace(own, passes=order))
        if problem.placement == placement.v(problem.ranks) and not problem.fused:
            with suppress(ValueError):
                others.append(braid(replace(solve("dualpipe-v", replace(problem, limits=None)), name=name), problem))
    for schedule in others:
        with suppress(ScheduleError):
            verify(schedule, problem.costs, problem.limits)
            yield schedule


def least_memory(name: str, problem: Problem) -> float:
    """The least limit that a family has a schedule for, in the costs' unit; the problem's own limits do not count.

    Raises:
        ValueError: it has none for these sizes.
    """
    family, problem = families.named(name), replace(problem, limits=None)
    if family.keeps:
        problem = replace(problem, limits=least_limits(family, problem))
    if family.memory is None:
        return max(activation_peaks(solve(name, problem), problem.costs))
    if family.plans_for_limits:
        return max(least_limit(problem, rank) for rank in range(problem.ranks)) + spreading(problem)
    return max(kept_limits(family, problem) or ())


def adapted(schedule: Schedule, problem: Problem, mode: Offload | None) -> Schedule:
    """A schedule that a user brings, once it is known to obey every rule, with what is asked for on top of it.

    Args:
        problem: its vocabulary is spread where the schedule does not do so itself; its limits and costs are kept.
        mode: what to copy to host memory; None for the schedule's own copies, if it has any.

    Raises:
        ScheduleError: a rule is broken, or a limit exceeded.
        HostLimitTooLow: the limit of host memory has no room for one copy.
    """
    verify(schedule)
    result = with_vocabulary(schedule, problem)
    if mode:
        result = offload(result, problem.costs, mode, problem.limits, problem.host_limit)
    if result is not schedule:
        verify(result)
    return _within(result, problem)


def with_vocabulary(schedule: Schedule, problem: Problem) -> Schedule:
    """The schedule with the vocabulary's passes, where the problem has them and the schedule does not."""
    if problem.vocabulary is None or schedule.vocabulary:
        return schedule
    return spread(postpone(schedule, postponed(problem.vocabulary, schedule.ranks)), problem.vocabulary, problem.costs)


def _within(schedule: Schedule, problem: Problem) -> Schedule:
    if problem.limits is not None:
        memory_stays_within(schedule, problem.costs, problem.limits)
    return schedule


def _offloaded(name: str, problem: Problem, mode: Offload) -> Schedule:
    """The schedule of a family with copies to host memory.

    A family that plans for any limit is asked for schedules that hold less and less, the shortest first: offloading one that
    holds less by itself leaves less on the device.
    """
    family, given = families.named(name), problem.limits
    # What is offloaded may hold more than 1F1B before: copies free it, and need time between F and B.
    fullest = max(map(problem.microbatch_memory, range(problem.ranks)))
    own = (family.memory(problem.ranks) * fullest + spreading(problem),) * problem.ranks if family.memory else None

    def attempt(limits: tuple[float, ...] | None) -> Schedule:
        base = solve(name, replace(problem, limits=limits, offload=None, host_limit=None))
        schedule = offload(base, problem.costs, mode, given, problem.host_limit)
        try:
            return _within(schedule, problem)
        except LimitTooLow as error:
            more = f"; or raise the limit of host memory, {problem.host_limit:g}" if problem.host_limit else ""
            raise LimitTooLow(f"{error}{more}", error.least) from None

    if own is None or (given is not None and not family.plans_for_limits):
        return attempt(own)
    if given is not None:
        return _largest(attempt, given, own)
    # Least memory is what copies are for; with few of them, the less there is before them, the less is left.
    named = kept_limits(family, problem)
    return min(map(attempt, dict.fromkeys((own, named))), key=lambda schedule: max(activation_peaks(schedule, problem.costs)))


def _largest(attempt: Callable[[tuple[float, ...]], Schedule], given: tuple[float, ...], own: tuple[float, ...]) -> Schedule:
    """The schedule of the first attempt that succeeds: with the family's own limits, or else with a multiple of the given ones.

    Raises:
        LimitTooLow: none succeeds.
    """
    refused: list[LimitTooLow] = []

    def tried(limits: tuple[float, ...]) -> Schedule | None:
        try:
            return attempt(limits)
        except LimitTooLow as error:
            refused.append(error)
            return None

    def scaled(times: float) -> tuple[float, ...]:
        return tuple(times * limit for limit in given)

    if schedule := tried(own):
        return schedule
    most = min(own) / min(given) if min(given) else 0.0
    steps = pairwise([most, *(times for times in _TIMES if times < most)])
    first = next(((schedule, low, high) for high, low in steps if (schedule := tried(scaled(low)))), None)
    if first is None:
        raise min(refused, key=lambda error: error.least)
    schedule, low, high = first
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        more = tried(scaled(middle))
        low, high, schedule = (middle, high, more) if more else (low, middle, schedule)
    return schedule


def _spread(name: str, problem: Problem, vocabulary: Vocabulary) -> Schedule:
    more, shard = spreading(problem), logits(problem)
    needs = []
    # With few microbatches, or where stages run again, less may be held than in a schedule without end.
    for reserved in (more, shard):
        try:
            return _spread_within(name, problem, vocabulary, reserved)
        except LimitTooLow as error:
            needs.append(error.least)
    # No rank ever holds more than all microbatches.
    least = min(needs[0], problem.microbatches * largest_microbatch(problem) + shard)
    raise LimitTooLow(
        f"{name} with a vocabulary spread as {vocabulary} needs {rounded_up(least)} on a rank, of which {rounded_up(more)} is "
        f"for spreading it, and the limit is {min(problem.limits or ()):g}: raise it to {rounded_up(least)}",
        least,
    )


def _spread_within(name: str, problem: Problem, vocabulary: Vocabulary, reserved: float) -> Schedule:
    """The same, with the family planned for the limits less an amount that is reserved for spreading the vocabulary."""
    limits = None if problem.limits is None else tuple(max(0.0, limit - reserved) for limit in problem.limits)
    try:
        stages = solve(name, replace(problem, limits=limits, vocabulary=None))
    except LimitTooLow as error:
        raise LimitTooLow(str(error), error.least + reserved) from None
    by = postponed(vocabulary, problem.ranks)
    # Interlaced, ranks stand still less often with a little more room, where the limits have it.
    room = range(by, by + 3 if vocabulary is Vocabulary.INTERLACED else by + 1)
    first, *others = (spread(postpone(stages, count), vocabulary, problem.costs) for count in room)
    if problem.limits is not None:
        most = min(problem.limits)
        others = [schedule for schedule in others if max(activation_peaks(schedule, problem.costs)) <= most]
    schedules = [_within(first, problem), *others]
    values = [problem.value(simulate(schedule, problem.costs)) for schedule in schedules]
    return next(schedule for schedule, value in zip(schedules, values, strict=True) if value <= _NEAR * min(values))
