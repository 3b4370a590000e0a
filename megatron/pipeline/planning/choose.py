"""Which schedule is the best here? Every family, planned for the same costs, limit and objective, and a choice among them.

wanted = Request(ranks=8, microbatches=32, costs_of=costs_of, memory_limit=6)
planned, refused = candidates(wanted, variants(ranks=8))
schedule = choose(planned).best.schedule
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import Costs, StageCosts, uniform
from megatron.pipeline.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.problem import Objective, Problem
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.core.timeline import Timeline
from megatron.pipeline.schedule.optimum.bound import own_bound
from megatron.pipeline.schedule.rules.verify import verify
from megatron.pipeline.schedule.time.jitter import Expected, expected
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate

AUTO = families.AUTO
NEAR = 1.001  # schedules this close to the shortest are as short: costs are not known better than that
MOST_CHUNKS = 4  # per rank, where nobody says: the bubble of more is hardly shorter, and each sends its activations too


@dataclass(frozen=True)
class Variant:
    """A family, with what it leaves to its user; None for the family's own."""

    name: str
    chunks: int | None = None
    group: int | None = None
    splits: int | None = None

    def __str__(self) -> str:
        given = (("v", self.chunks), ("g", self.group), ("S", self.splits))
        return " ".join([self.name, *(f"{letter}={number}" for letter, number in given if number is not None)])


def variants(ranks: int, names: Iterable[str] | None = None, chunks: Sequence[int] | None = None) -> list[Variant]:
    """What there is to try.

    Args:
        names: of the families; by default all.
        chunks: the numbers of chunks per rank to try for families that take several; by default up to ``MOST_CHUNKS``.

    Raises:
        ValueError: a name is unknown.
    """
    found = []
    for name in families.FAMILIES if names is None else dict.fromkeys(names):
        family = families.named(name)
        numbers: Iterable[int | None] = [None]
        if family.any_chunks:
            numbers = range(family.chunks, MOST_CHUNKS + 1) if chunks is None else dict.fromkeys(chunks)
        found += [Variant(name, number, group) for number in numbers for group in _groups(name, ranks)]
    return found


def _groups(name: str, ranks: int) -> Iterator[int | None]:
    yield None
    between = -(-3 * ranks // 4)
    if name == "gis" and ranks // 2 < between < ranks:  # gis has groups of p microbatches, gis-h of p/2
        yield between


@dataclass(frozen=True)
class Request:
    """What a schedule is wanted for, whichever family and placement it will have.

    Attributes:
        ranks, microbatches: at least 1 each.
        costs_of: from a placement to the costs of its stages; a ValueError says why the model cannot be cut so.
        memory_limit: the most activation memory that a rank may hold, in the costs' unit; None for any amount.
        objective: what is to be short.
        recompute, fused: from a placement to the stages that run R, and to those that run BW.
        jitter: see ``Problem``; above 0 the expected case is what is compared.
        vocabulary: how it is spread over all ranks, if it is.
        offload, host_limit: see ``Problem``.
    """

    ranks: int
    microbatches: int
    costs_of: Callable[[Placement], Costs]
    memory_limit: float | None = None
    objective: Objective = Objective.SPAN
    recompute: Callable[[Placement], Iterable[int]] = lambda placement: ()
    fused: Callable[[Placement], Iterable[int]] = lambda placement: ()
    jitter: float = 0.0
    vocabulary: Vocabulary | None = None
    offload: Offload | None = None
    host_limit: float | None = None

    def problem(self, variant: Variant) -> Problem:
        """What this asks of one family.

        Raises:
            ValueError: the name is unknown, or sizes, costs or the limit do not fit the family.
        """
        placement = families.placement(variant.name, self.ranks, variant.chunks)
        return families.problem(
            variant.name,
            self.ranks,
            self.microbatches,
            self.costs_of(placement),
            variant.chunks,
            self.memory_limit,
            objective=self.objective,
            recompute=self.recompute(placement),
            fused=self.fused(placement),
            splits=variant.splits,
            group=variant.group,
            jitter=self.jitter,
            vocabulary=self.vocabulary,
            offload=self.offload,
            host_limit=self.host_limit,
        )


@dataclass(frozen=True)
class Candidate:
    """A schedule that was planned and verified.

    Attributes:
        variant: what was planned.
        problem: what it was planned for. Its limits are those that the family kept: the user's, or what its name stands for.
        seconds: how long planning took.
    """

    variant: Variant
    problem: Problem
    schedule: Schedule
    seconds: float

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.problem.costs)

    @cached_property
    def expected(self) -> Expected | None:
        """The spans and makespans under the problem's jitter, if there is any."""
        return expected(self.schedule, self.problem.costs, self.problem.jitter) if self.problem.jitter else None

    @property
    def value(self) -> float:
        """What is to be short: span or makespan, of the expected case where there is jitter."""
        if self.expected is None:
            return self.problem.value(self.timeline)
        return self.expected.span if self.problem.objective is Objective.SPAN else self.expected.makespan

    @cached_property
    def peak(self) -> float:
        """The most that a rank holds, in the costs' unit."""
        return max(activation_peaks(self.schedule, self.problem.costs))

    @cached_property
    def bound(self) -> float:
        """What no order of the passes within the schedule's own memory can beat, in the nominal case: see ``own_bound``."""
        return own_bound(self.schedule, self.problem)

    @property
    def gap(self) -> float:
        """How far the schedule is above that, as a share of it."""
        return self.problem.value(self.timeline) / self.bound - 1 if self.bound else 0.0


@dataclass(frozen=True)
class Refusal:
    """Why there is no schedule of a family.

    Attributes:
        reason: a sentence for the user.
        needs: the memory that the family takes, in the costs' unit, where the limit is below it.
    """

    variant: Variant
    reason: str
    needs: float | None = None


def candidate(request: Request, variant: Variant) -> Candidate:
    """Plan and verify one schedule.

    Raises:
        ValueError: there is none for this name and these sizes, costs and limit.
    """
    begin = time.perf_counter()
    problem = request.problem(variant)
    schedule = families.solve(variant.name, problem)
    seconds = time.perf_counter() - begin
    verify(schedule, problem.costs, problem.limits)
    return Candidate(variant, problem, schedule, seconds)


def candidates(request: Request, wanted: Iterable[Variant]) -> tuple[list[Candidate], list[Refusal]]:
    """Plan and verify every schedule that is wanted.

    Returns:
        Those that there are, the shortest first, and of those equally short the one that holds least; and the others.
    """
    planned: list[Candidate] = []
    refused: list[Refusal] = []
    for variant in wanted:
        try:
            planned.append(candidate(request, variant))
        except ValueError as error:
            refused.append(Refusal(variant, str(error), _needs(request, variant)))
    planned.sort(key=lambda candidate: (candidate.value, candidate.peak))
    return planned, refused


def _needs(request: Request, variant: Variant) -> float | None:
    """The memory that a family takes, or at least takes, if that is more than the limit."""
    if request.memory_limit is None:
        return None
    try:
        needs = least_memory(request, variant)
    except ValueError:
        return None  # memory is not all that is wrong
    return needs if needs > request.memory_limit else None


def least_memory(request: Request, variant: Variant) -> float:
    """The memory that a family takes, or at least takes where it plans for limits, in the costs' unit.

    Raises:
        ValueError: there is none for this name and these sizes and costs, whatever the limit.
    """
    return families.least_memory(variant.name, replace(request, memory_limit=None).problem(variant))


def peak_of_1f1b(ranks: int, microbatches: int, costs: Costs | None = None) -> float:
    """The most that a rank of 1F1B holds where the model is cut into one stage per rank: what limits are told in.

    Args:
        costs: of as many stages as the ranks can share equally, in the model's order; equal stages by default.
    """
    schedule = families.plan("1f1b", ranks, microbatches)
    if costs is None:
        return max(activation_peaks(schedule, uniform(schedule.placement)))
    chunks = max(1, len(costs.stages) // ranks)
    held = [sum(stage.activation for stage in costs.stages[rank * chunks : (rank + 1) * chunks]) for rank in range(ranks)]
    return max(activation_peaks(schedule, Costs(tuple(StageCosts(0, 0, 0, one, one) for one in held))))


@dataclass(frozen=True)
class Choice:
    """The best of some schedules.

    Attributes:
        why_not: why the others are not the best, by variant.
    """

    best: Candidate
    why_not: dict[Variant, str]


def choose(planned: Sequence[Candidate]) -> Choice:
    """The shortest schedule; among those within 0.1 % of it the one that holds least, then the one that sends least, and then
    the simplest, whose family comes first in ``FAMILIES``.

    Schedules that hold the model twice, DualPipe and Chimera, are never the best: a limit on activations does not count that.

    Raises:
        ValueError: there is nothing to choose from.
    """
    single = [candidate for candidate in planned if candidate.problem.placement.replicas == 1]
    if not single:
        raise ValueError(
            "no schedule that holds the model once fits: raise the memory limit, or change the ranks or microbatches"
        )
    limit = min(candidate.value for candidate in single) * NEAR
    best = min((candidate for candidate in single if candidate.value <= limit), key=_ties)
    why_not = {}
    for candidate in planned:
        if candidate is best:
            continue
        if candidate.problem.placement.replicas > 1:
            reason = "holds the model twice"
        elif candidate.value > limit:
            reason = f"{candidate.value / best.value - 1:.1%} longer"
        else:
            more = ("holds more", "sends more", "less simple")
            differ = (mine != its for mine, its in zip(_ties(candidate), _ties(best), strict=True))
            reason = f"as short, {next((what for what, differs in zip(more, differ, strict=True) if differs), 'no better')}"
        why_not[candidate.variant] = reason
    return Choice(best, why_not)


def _ties(candidate: Candidate) -> tuple[float, int, int]:
    """What decides between schedules that are equally short: memory, messages per microbatch, and the family's place."""
    memory = float(f"{candidate.peak:.9g}")  # sums of fractions such as 1/3 differ in their last bits
    messages = candidate.problem.placement.chunks_per_replica * candidate.problem.splits
    return memory, messages, list(families.FAMILIES).index(candidate.variant.name)
