"""The families of schedules, by name. A family is one file with one ``plan`` function; adding one is adding it here."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatron.pipeline.schedule.core.costs import EQUAL_SHARDS, Costs, uniform
from megatron.pipeline.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.problem import ChunksDoNotFit, LimitTooLow, Objective, Problem
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.families import (
    chimera,
    dualpipe,
    gis,
    interleaved,
    one_f_one_b,
    seq_1f1b,
    v,
    zb_auto,
    zb_h1,
    zb_h2,
)
from megatron.pipeline.schedule.families.family import Family
from megatron.pipeline.schedule.optimum.bound import least_limit
from megatron.pipeline.schedule.rules.verify import memory_stays_within, per_rank, rounded_up
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.schedule.transforms.offload import offload
from megatron.pipeline.schedule.transforms.transform import fuse, recompute
from megatron.pipeline.schedule.transforms.vocabulary import MOST_WAITING, postpone, postponed, spread

__all__ = ["AUTO", "FAMILIES", "Family", "least_memory", "named", "placement", "plan", "problem", "solve"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        one_f_one_b.FAMILY,
        interleaved.FAMILY,
        gis.FAMILY,
        gis.FAMILY_HALF,
        seq_1f1b.FAMILY,
        zb_h1.FAMILY,
        zb_h2.FAMILY,
        zb_auto.FAMILY,
        *v.FAMILIES,
        dualpipe.FAMILY_V,
        dualpipe.FAMILY,
        chimera.FAMILY,
    )
}
_NEAR = 1.01  # as short: what holds less is better then
AUTO = "auto"  # where a user names a schedule: the best of all (``choose``)


def named(name: str) -> Family:
    """The family of a name.

    Raises:
        ValueError: the name is unknown; the message says which one it may be meant to be.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join(FAMILIES)}{meant(name, [*FAMILIES, AUTO])}")
    return FAMILIES[name]


def meant(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: which of the known ones it may be meant to be, if any is near."""
    near = difflib.get_close_matches(name.lower(), list(known))
    return f"; did you mean {' or '.join(near)}?" if near else ""


def plan(
    name: str,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    chunks: int | None = None,
    memory_limit: float | Sequence[float] | None = None,
    **options: object,
) -> Schedule:
    """The schedule of a family; see ``problem`` for the arguments.

    Raises:
        ValueError: the name is unknown, a number is out of range, or the schedule would hold more than the limit.
    """
    return solve(name, problem(name, ranks, microbatches, costs, chunks, memory_limit, **options))  # type: ignore[arg-type]


def problem(
    name: str,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    chunks: int | None = None,
    memory_limit: float | Sequence[float] | None = None,
    *,
    objective: Objective | str = Objective.SPAN,
    recompute: Iterable[int] = (),
    fused: Iterable[int] = (),
    splits: int | None = None,
    group: int | None = None,
    jitter: float = 0.0,
    vocabulary: Vocabulary | None = None,
    offload: Offload | None = None,
    host_limit: float | None = None,
) -> Problem:
    """What a family is asked to plan.

    Args:
        name: one of ``FAMILIES``.
        ranks, microbatches: at least 1 each.
        costs: what passes take on every stage of ``placement(name, ranks, chunks)``; by default every pass of a rank's
            whole share takes 1, and memory is counted in microbatches.
        chunks: chunks per rank; by default the family's own number.
        memory_limit: the most activation memory a rank may hold, in the costs' unit; one number, or one per rank.
        objective: what is to be short, for families that search.
        recompute, fused: the stages that run R, and those that run BW where the family splits.
        splits, group: see ``Problem``; only for families that take them.
        jitter: see ``Problem``.
        vocabulary: how the vocabulary is spread over all ranks, if it is. What a name stands for, and every schedule, then holds
            as many microbatches more as ``vocabulary.postponed`` says.
        offload: how much of the activations may go to host memory. The limit is then of what is left on the device, and what a
            name stands for (V-Half, say) is the schedule that is offloaded.
        host_limit: see ``Problem``.

    Raises:
        ValueError: the name is unknown, or a number is out of range or not for this family.
    """
    home, family = placement(name, ranks, chunks), named(name)
    if splits is not None and splits != family.splits and family.splits == 1:
        raise ValueError(f"{name} does not cut microbatches into slices: leave --splits out")
    if group is not None and not family.grouped:
        raise ValueError(f"{name} does not run microbatches in groups: leave --group out")
    costs = costs or uniform(home, vocabulary=EQUAL_SHARDS if vocabulary else None)
    return Problem(
        home,
        microbatches,
        costs,
        _given(memory_limit, home) if offload else _limits(family, home, costs, memory_limit, vocabulary),
        Objective(objective),
        frozenset(recompute),
        frozenset(fused),
        family.splits if splits is None else splits,
        group,
        jitter,
        vocabulary,
        offload,
        host_limit,
    )


def _given(memory_limit: float | Sequence[float] | None, placement: Placement) -> tuple[float, ...] | None:
    return None if memory_limit is None else tuple(per_rank(memory_limit, placement.ranks))


def _limits(
    family: Family,
    placement: Placement,
    costs: Costs,
    memory_limit: float | Sequence[float] | None,
    vocabulary: Vocabulary | None,
) -> tuple[float, ...] | None:
    """What a rank may hold, from the user's limit and the amount that the family stands for."""
    given = _given(memory_limit, placement)
    if family.memory is None:
        return given
    problem = Problem(placement, 1, costs)
    microbatch = max(problem.microbatch_memory(rank) for rank in range(placement.ranks))
    count = family.memory(placement.ranks)
    more = memory_of_spreading(replace(problem, vocabulary=vocabulary))
    own = (count * microbatch + more,) * placement.ranks
    if given is None:
        return own
    if family.memory_is != "default" and min(given) < own[0] * (1 - 1e-9):
        raise LimitTooLow(
            f"{family.name} on {placement.ranks} ranks is the schedule with room for {count:g} microbatches, {own[0]:g} on every "
            f"rank, and the limit is {min(given):g}: give at least {rounded_up(own[0])}, or take v-auto, which plans for any "
            f"limit from {rounded_up(microbatch + more)} up",
            own[0],
        )
    return own if family.memory_is == "fixed" else given


def solve(name: str, problem: Problem) -> Schedule:
    """The schedule of a family for a problem on its placement.

    Raises:
        ValueError: the schedule would hold more than the limits.
    """
    if problem.offload:
        return _offloaded(name, problem, problem.offload)
    if problem.vocabulary:
        return _spread(name, problem, problem.vocabulary)
    schedule = Schedule(name, problem.placement, problem.microbatches, FAMILIES[name].plan(problem), problem.splits)
    schedule = recompute(fuse(schedule, problem.fused), problem.recompute)
    if problem.limits is not None:
        memory_stays_within(schedule, problem.costs, problem.limits)
    return schedule


def _offloaded(name: str, problem: Problem, mode: Offload) -> Schedule:
    """The schedule of a family with copies to host memory.

    A family that plans for any limit is asked for schedules that hold less and less, the shortest first: offloading one that
    holds less by itself leaves less on the device.
    """
    family, given = named(name), problem.limits
    own = _limits(family, problem.placement, problem.costs, None, problem.vocabulary)

    def attempt(limits: tuple[float, ...] | None) -> Schedule:
        base = solve(name, replace(problem, limits=limits, offload=None, host_limit=None))
        made = offload(base, problem.costs, mode, given, problem.host_limit)
        if given is not None:
            try:
                memory_stays_within(made, problem.costs, given)
            except LimitTooLow as error:
                more = f"; or raise the limit of host memory, {problem.host_limit:g}" if problem.host_limit else ""
                raise LimitTooLow(f"{error}{more}", error.least) from None
        return made

    if given is None or own is None or family.memory_is != "default":
        return attempt(own)
    return _largest(attempt, given, own)


def _largest(attempt: Callable[[tuple[float, ...]], Schedule], given: tuple[float, ...], own: tuple[float, ...]) -> Schedule:
    """What comes of the most memory for a schedule with which an attempt succeeds: its own, or so many times what is given.

    Raises:
        LimitTooLow: none does.
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

    made = tried(own)
    if made is not None:
        return made
    low = high = min(own) / min(given) if min(given) else 0.0
    for times in _TIMES:
        if times < low:
            high, low = low, times
            made = tried(scaled(low))
            if made is not None:
                break
    if made is None:
        raise min(refused, key=lambda error: error.least)
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        more = tried(scaled(middle))
        low, high = (low, middle) if more is None else (middle, high)
        made = more or made
    return made


_TIMES = (12, 8, 6, 4, 3, 2, 1.5, 1)  # a schedule's own memory over what is left of it on the device
_HALVINGS = 2  # of the step between two of them


def _spread(name: str, problem: Problem, vocabulary: Vocabulary) -> Schedule:
    """The schedule of a family with the vocabulary's passes."""
    more, logits = memory_of_spreading(problem), _logits(problem)
    needs = []
    # With few microbatches, or where stages run again, less may be held than a schedule without end would.
    for reserved in (more, logits):
        try:
            return _spread_within(name, problem, vocabulary, reserved)
        except LimitTooLow as error:
            needs.append(error.least)
    least = min(needs[0], problem.microbatches * _microbatch(problem) + logits)  # no rank ever holds more than all
    raise LimitTooLow(
        f"{name} with a vocabulary spread as {vocabulary} needs {rounded_up(least)} on a rank, of which {rounded_up(more)} is "
        f"for spreading it, and the limit is {min(problem.limits or ()):g}: raise it to {rounded_up(least)}",
        least,
    )


def _spread_within(name: str, problem: Problem, vocabulary: Vocabulary, reserved: float) -> Schedule:
    """The same, planned for what the limits leave beside an amount that is reserved for spreading the vocabulary."""
    limits = None if problem.limits is None else tuple(max(0.0, limit - reserved) for limit in problem.limits)
    try:
        stages = solve(name, replace(problem, limits=limits, vocabulary=None))
    except LimitTooLow as error:
        raise LimitTooLow(str(error), error.least + reserved) from None
    by = postponed(vocabulary, problem.ranks)
    # Interlaced, ranks stand still less often with a little more room, where the limits have it.
    room = range(by, by + 3 if vocabulary is Vocabulary.INTERLACED else by + 1)
    made = [spread(postpone(stages, count), vocabulary, problem.costs) for count in room]
    if problem.limits is not None:
        peaks = [max(activation_peaks(schedule, problem.costs)) for schedule in made]
        made = made[:1] + [schedule for schedule, peak in zip(made[1:], peaks[1:], strict=True) if peak <= min(problem.limits)]
        memory_stays_within(made[0], problem.costs, problem.limits)
    values = [problem.value(simulate(schedule, problem.costs)) for schedule in made]
    return next(schedule for schedule, value in zip(made, values, strict=True) if value <= _NEAR * min(values))


def least_memory(name: str, problem: Problem) -> float:
    """The least limit that a family has a schedule for, in the costs' unit, whatever the limits of the problem are.

    Raises:
        ValueError: it has none for these sizes.
    """
    family = named(name)
    if family.memory is None:
        return max(activation_peaks(solve(name, replace(problem, limits=None)), problem.costs))
    if family.memory_is == "default":
        return max(least_limit(problem, rank) for rank in range(problem.ranks)) + memory_of_spreading(problem)
    return max(_limits(family, problem.placement, problem.costs, None, problem.vocabulary) or ())


def memory_of_spreading(problem: Problem) -> float:
    """What a rank may hold more than without where the vocabulary is spread, in the costs' unit."""
    if problem.vocabulary is None:
        return 0.0
    return postponed(problem.vocabulary, problem.ranks) * _microbatch(problem) + _logits(problem)


def _microbatch(problem: Problem) -> float:
    """What a rank holds of one microbatch's stages, at most."""
    return max(stage.activation for stage in problem.costs.stages) * problem.placement.chunks


def _logits(problem: Problem) -> float:
    """What a rank holds for its shard of the vocabulary: one S may run while so many wait for their T."""
    return (MOST_WAITING + 1) * problem.costs.vocabulary.activation


def placement(name: str, ranks: int, chunks: int | None = None) -> Placement:
    """The placement that a family uses: what per-stage costs must be given for.

    Raises:
        ChunksDoNotFit: the family does not come with that many chunks.
        ValueError: the name is unknown, or the family does not come with that many ranks.
    """
    family = named(name)
    if ranks < 1:
        raise ValueError(f"a pipeline needs at least 1 rank, got {ranks}")
    if ranks < family.least_ranks or (family.even_ranks and ranks % 2):
        even = "an even number of ranks, " if family.even_ranks else ""
        raise ValueError(f"{name} needs {even}at least {family.least_ranks}, got {ranks}")
    if chunks is None:
        chunks = family.chunks
    if chunks != family.chunks and not family.any_chunks:
        raise ChunksDoNotFit(f"{name} has {family.chunks} chunk(s) per rank, got {chunks}")
    if chunks < family.least_chunks:
        raise ChunksDoNotFit(f"{name} needs at least {family.least_chunks} chunk(s) per rank, got {chunks}")
    return family.placement(ranks, chunks)
