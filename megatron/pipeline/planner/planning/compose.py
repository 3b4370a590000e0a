"""From a problem to a schedule within its limits: the stages of planning, in one order.

``stages`` is the whole composition: a family's order, then fused backwards, the vocabulary's passes, copies to host memory,
overlapped forwards and backwards, and work behind the collectives of backwards. Each stage asks those before it for a schedule,
perhaps for other limits: the vocabulary needs memory that the family does not count, and offloading frees some, so that it
searches for the best limits where the family plans for any. They answer with a schedule within the limits, or with the refusal
that says what would suffice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from megatron.pipeline.planner.planning.limits import kept_limits, largest_microbatch, least_limits, logits, of_stages, spreading
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting, placement
from megatron.pipeline.planner.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.optimum.bound import least_limit
from megatron.pipeline.planner.schedule.rules.verify import excess, rounded_up, verify
from megatron.pipeline.planner.schedule.search.overlapped import list_schedule_overlapped
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.boundary import waits_for_norm
from megatron.pipeline.planner.schedule.transforms.braid import braid, combined
from megatron.pipeline.planner.schedule.transforms.join import join, saves, shields, split
from megatron.pipeline.planner.schedule.transforms.offload import offload
from megatron.pipeline.planner.schedule.transforms.transform import without_copies
from megatron.pipeline.planner.schedule.transforms.vocabulary import delay_backwards, postponed, shard_vocabulary

_NEAR = 1.01  # as short: the schedule that holds less is better then
_TIMES = (12, 8, 6, 4, 3, 2, 1.5, 1)  # a schedule's own memory, over what offloading leaves of it on the device
_HALVINGS = 2  # of the step between two of them

Made: TypeAlias = Schedule | LimitTooLow
Before: TypeAlias = Callable[[Problem], Made]  # the stages before one
Stage: TypeAlias = Callable[[families.Family, Before, Problem], Made]


def stages(family: families.Family, problem: Problem) -> list[Stage]:
    """The stages that apply after the family's own order, each of what those above it make."""
    cheaper = frozenset(stage for stage, cost in enumerate(problem.costs.stages) if saves(cost) or cost.backward_allocates)
    worth = frozenset(stage for stage, cost in enumerate(problem.costs.stages) if shields(cost))
    in_order: list[tuple[Stage, object]] = [
        (partial(_fused, cheaper=cheaper), cheaper and not (family.fused or problem.fused)),
        (_spread, problem.vocabulary),
        (_offloaded, problem.offload),
        (_braided, problem.overlap),
        (partial(_shielded, worth=worth), worth and not (family.fused or problem.quick)),
    ]
    return [stage for stage, applies in in_order if applies]


def solve(name: str, problem: Problem) -> Schedule:
    """The schedule of a family for a problem on its placement.

    Raises:
        LimitTooLow: the schedule would hold more than the limits.
        HostLimitTooLow: the limit of host memory has no room for one copy.
    """
    family, make = families.named(name), partial(_base, name)
    if problem.overlap and problem.quick:
        problem = replace(problem, overlap=False)
    for stage in stages(family, problem):
        make = partial(stage, family, make)
    return _schedule(make(problem))


def _schedule(made: Made) -> Schedule:
    if isinstance(made, LimitTooLow):
        raise made
    return made


def _fit(schedule: Schedule, problem: Problem) -> Made:
    """The schedule if it is within the limits."""
    if problem.limits is None:
        return schedule
    return excess(schedule, problem.costs, problem.limits) or schedule


def _shortest(schedules: list[Schedule], problem: Problem) -> Schedule:
    return min(schedules, key=lambda schedule: problem.value(simulate(schedule, problem.costs)))


def _base(name: str, problem: Problem) -> Made:
    """The family's own order of passes."""
    try:
        return _fit(of_stages(name, problem), problem)
    except LimitTooLow as refusal:
        return refusal


def _fused(family: families.Family, before: Before, problem: Problem, cheaper: frozenset[int]) -> Made:
    """Backwards that are fused one by one as far as that makes the schedule shorter; never longer than with all of them fused.

    Args:
        cheaper: the stages whose BW takes or holds less than B and W.
    """
    found, refused = [], []
    for fused in (frozenset[int](), cheaper):
        made = before(replace(problem, fused=fused))
        if isinstance(made, LimitTooLow):
            refused.append(made)
        else:
            tried = made if fused or problem.quick else join(made, problem)
            found.append(tried if problem.quick else split(tried, problem))
    return _shortest(found, problem) if found else min(refused, key=lambda refusal: refusal.least)


def _spread(family: families.Family, before: Before, problem: Problem) -> Made:
    """A spread vocabulary: the family is planned for the limits less what is reserved for spreading it."""
    assert problem.vocabulary
    more, shard = spreading(problem), logits(problem)
    needs = []
    # With few microbatches, or where stages run again, less may be held than in a schedule without end.
    for reserved in (more, shard):
        limits = problem.limits and tuple(max(0.0, limit - reserved) for limit in problem.limits)
        made = before(replace(problem, limits=limits, vocabulary=None))
        if isinstance(made, LimitTooLow):
            needs.append(made.least + reserved)
        elif isinstance(made := _with_vocabulary_of(problem.vocabulary, made, problem), LimitTooLow):
            needs.append(made.least)
        else:
            return made
    # No rank ever holds more than all microbatches.
    least = min(needs[0], problem.microbatches * largest_microbatch(problem) + shard)
    return LimitTooLow(
        f"{family.name} with a vocabulary spread as {problem.vocabulary} needs {rounded_up(least)} on a rank, of which "
        f"{rounded_up(more)} is for spreading it, and the limit is {min(problem.limits or ()):g}: raise it to "
        f"{rounded_up(least)}",
        least,
    )


def _with_vocabulary_of(vocabulary: Vocabulary, schedule: Schedule, problem: Problem) -> Made:
    by = postponed(vocabulary, problem.ranks)
    # Interlaced, ranks stand still less often with a little more room, where the limits have it.
    room = range(by, by + 3 if vocabulary is Vocabulary.INTERLACED else by + 1)
    first, *others = (shard_vocabulary(delay_backwards(schedule, count), vocabulary, problem.costs) for count in room)
    if problem.limits is not None:
        if isinstance(refusal := _fit(first, problem), LimitTooLow):
            return refusal
        most = min(problem.limits)
        others = [schedule for schedule in others if max(activation_peaks(schedule, problem.costs)) <= most]
    schedules = [first, *others]
    values = [problem.value(simulate(schedule, problem.costs)) for schedule in schedules]
    return next(schedule for schedule, value in zip(schedules, values, strict=True) if value <= _NEAR * min(values))


def _offloaded(family: families.Family, before: Before, problem: Problem) -> Made:
    """Copies to host memory.

    A family that plans for any limit is asked for schedules that hold less and less, the shortest first: offloading one that
    holds less by itself leaves less on the device.
    """
    mode, given, host_limit = problem.offload, problem.limits, problem.host_limit
    assert mode
    # What is offloaded may hold more than 1F1B before: copies free it, and need time between F and B.
    ranks = problem.placement.ranks
    fullest = max(map(problem.microbatch_memory, range(ranks)))
    own = (family.memory(ranks) * fullest + spreading(problem),) * ranks if family.memory else None

    def attempt(limits: tuple[float, ...] | None) -> Made:
        made = before(replace(problem, limits=limits, offload=None, host_limit=None))
        if isinstance(made, LimitTooLow):
            return made
        made = _fit(offload(made, problem.costs, mode, given, host_limit), problem)
        more = f"; or raise the limit of host memory, {host_limit:g}" if host_limit else ""
        return LimitTooLow(f"{made}{more}", made.least) if isinstance(made, LimitTooLow) else made

    if own is None or (given is not None and not family.plans_for_limits):
        return attempt(own)
    if given is not None:
        return _largest(attempt, given, own)
    # Least memory is what copies are for; with few of them, the less there is before them, the less is left.
    made = [attempt(limits) for limits in dict.fromkeys((own, kept_limits(family, problem)))]
    return min(map(_schedule, made), key=lambda schedule: max(activation_peaks(schedule, problem.costs)))


def _largest(attempt: Callable[[tuple[float, ...]], Made], given: tuple[float, ...], own: tuple[float, ...]) -> Made:
    """The schedule of the first attempt that succeeds: with the family's own limits, or else with a multiple of those given."""

    def scaled(times: float) -> Made:
        return attempt(tuple(times * limit for limit in given))

    best = attempt(own)
    if not isinstance(best, LimitTooLow):
        return best
    high = min(own) / min(given) if min(given) else 0.0
    for low in [times for times in _TIMES if times < high]:
        made = scaled(low)
        if not isinstance(made, LimitTooLow):
            break
        high, best = low, min(best, made, key=lambda refusal: refusal.least)
    else:
        return best
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        more = scaled(middle)
        low, high, made = (low, middle, made) if isinstance(more, LimitTooLow) else (middle, high, more)
    return made


def _braided(family: families.Family, before: Before, problem: Problem) -> Made:
    """Overlapped forwards and backwards; never longer than without."""
    own = before(alone := replace(problem, overlap=False))
    if isinstance(own, LimitTooLow):
        return own
    return _shortest([braid(own, problem), *_of_braids(family, alone, own)], problem)


def _shielded(family: families.Family, before: Before, problem: Problem, worth: frozenset[int]) -> Made:
    """Collectives of B hidden behind weight gradients on the stages where that makes the schedule shorter; never longer.

    Args:
        worth: the stages where B and W are then shorter together.
    """
    own = before(problem)
    made = before(replace(problem, costs=cutting.shielded(problem.costs, worth)))
    if isinstance(own, LimitTooLow) or isinstance(made, LimitTooLow):
        return own
    made = replace(made, shielded=worth)
    for stage in sorted(worth):
        made = _shortest([replace(made, shielded=made.shielded - {stage}), made], problem)
    return _shortest([own, made], problem)


def _of_braids(family: families.Family, problem: Problem, own: Schedule) -> Iterator[Schedule]:
    """Schedules that are made for braids, of those that keep to the limits.

    A family that searches is asked for an order as if all communication of layers were hidden, and one is made of braids from the
    start; on a V there is DualPipeV's. Where all backwards are fused, as in interleaved, there is megatron-core's combined order.
    """
    plain = not (problem.offload or problem.vocabulary or problem.recompute)
    others = [more] if (more := combined(own)) is not None else []
    if family.searches and plain:
        if (hidden := cutting.hidden(problem.costs)) != problem.costs:
            yield braid(solve(family.name, replace(problem, costs=hidden)), problem)
        if family.memory and (order := list_schedule_overlapped(problem)) is not None:
            others.append(replace(own, passes=order))
        if problem.placement == placement.v(problem.ranks) and not problem.fused:
            with suppress(ValueError):
                others.append(braid(replace(solve("dualpipe-v", replace(problem, limits=None)), name=family.name), problem))
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
        ScheduleError: a rule is broken, a limit exceeded, or passes of the vocabulary would have to stand between its copies.
        HostLimitTooLow: the limit of host memory has no room for one copy.
    """
    verify(schedule, waits_for_norm=waits_for_norm(problem))
    result = with_vocabulary(without_copies(schedule) if mode else schedule, problem)
    if mode:
        result = offload(result, problem.costs, mode, problem.limits, problem.host_limit)
    if result is not schedule:
        result = replace(result, boundary=())  # which is of other passes
        verify(result)
    return _schedule(_fit(result, problem))


def with_vocabulary(schedule: Schedule, problem: Problem) -> Schedule:
    """The schedule with the vocabulary's passes, where the problem has them and the schedule does not."""
    if problem.vocabulary is None or schedule.vocabulary:
        return schedule
    if schedule.has_copies:
        raise ScheduleError(
            f"{schedule.name} copies activations to host memory, and has no passes of the vocabulary, which --vocab-parallel "
            f"{problem.vocabulary} puts between passes: plan it with that, or give --offload, which plans its copies anew"
        )
    return shard_vocabulary(
        delay_backwards(schedule, postponed(problem.vocabulary, schedule.ranks)), problem.vocabulary, problem.costs
    )
