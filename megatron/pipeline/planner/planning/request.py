"""Request for a plan: a schedule's name and sizes, what passes cost, what memory there is, and what is to be changed.

    planned = Request("v-auto", ranks=8, microbatches=32, costs=costs, memory_limit=6).plan()

The command line, the page, training and tuning all construct a ``Request``; ``problem`` is the only place that checks one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from numbers import Integral
from typing import Any, TypeAlias

from megatron.pipeline.planner.combinations.rows import GROUPS
from megatron.pipeline.planner.combinations.table import Facts
from megatron.pipeline.planner.planning import kept
from megatron.pipeline.planner.planning.balance import Model, balanced, check_layers, finer
from megatron.pipeline.planner.planning.compose import solve
from megatron.pipeline.planner.planning.costs import slow_stages
from megatron.pipeline.planner.planning.limits import Beside, kept_limits
from megatron.pipeline.planner.planning.planned import Planned, Variant
from megatron.pipeline.planner.planning.refusals import MICROBATCHES, Unit
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import costs_fields
from megatron.pipeline.planner.schedule.core.costs import EQUAL_PASSES, EQUAL_SHARDS, Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.cutting import trained, with_parts
from megatron.pipeline.planner.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved
from megatron.pipeline.planner.schedule.core.problem import GOAL, Objective, Problem, per_rank
from megatron.pipeline.planner.schedule.families import Family
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.transforms.boundary import waits_for_norm, with_boundary

MOST_CHUNKS = 4  # per rank, where the user gives no number: the bubble of more is hardly shorter, and each sends activations too
MOST_PASSES = 3_000_000  # what fits into a few GB of memory and a minute
MOST_RANKS = costs_fields.MOST_RANKS

_FLAGS = {"pp": "ranks", "fuse": "fused", "vocab_parallel": "vocabulary", "host_memory_limit": "host_limit"}  # to fields

StagesOf: TypeAlias = Callable[[Placement], Iterable[int]]
CostsOf: TypeAlias = Callable[[Placement], Costs]
EqualOf: TypeAlias = Callable[[Placement, Vocabulary | None], Sequence[StageCosts]]
BesideOf: TypeAlias = Callable[..., Beside | None]  # of (placement, vocabulary, in_bytes=False)


@dataclass(frozen=True)
class Request:
    """Request for a schedule.

    Attributes:
        schedule: a family's name; or ``AUTO`` where ``candidates`` tries several (see ``variants``).
        ranks, microbatches: at least 1 each.
        costs: of every stage of the family's placement, or from a placement to those, with a ValueError where the model cannot
            be cut so. By default every pass of a rank's whole share takes 1, and memory is counted in microbatches.
        chunks: chunks per rank; by default the family's own number.
        memory_limit: the most activation memory a rank may hold, in the costs' unit; one number, or one per rank.
        objective: what is to be short, for families that search: the makespan, unless post-validation makes iterations interlock.
        recompute, fused: the stages that run R, and those that run BW where the family splits the backward; or a function from
            the placement to those.
        splits, group: see ``Problem``; only for families that take them.
        vocabulary: how the vocabulary is spread over all ranks, if it is. A family that stands for an amount of memory then
            holds ``vocabulary.postponed`` microbatches more.
        offload: how much of the activations may go to host memory. The limit is then that of the device, and a family that
            stands for an amount of memory is planned for that amount and offloaded afterwards.
        host_limit: see ``Problem``.
        overlap: whether a forward and a backward of other microbatches may run as one, so that the communication of one is hidden
            behind the other's computation (``transforms.braid``). Costs say what parts layers have; otherwise they are assumed
            (``cutting.with_parts``).
        quick: see ``Problem``: a valid plan in a fifth of a second for a few thousand passes, which a search would make shorter.
        equal: what a rank's whole share costs where no costs are given; or of every stage of a placement, whose vocabulary is
            spread or at its ends.
        layers: of the model, if these are to be split over the stages so that the schedule is short (``planning.balance``): what
            each costs, or how many there are, into which costs are then cut; ``Planned.split`` says how many a stage gets. None:
            stages are as the costs say.
        slow: with ``layers``, by rank, how many times as long its passes take; else costs have it.
        unit: in which refusals tell the user amounts of memory.
        beside: what ranks need beside activations, for limits where there is no ``memory_limit``: see ``limits.kept_limits``; or
            from a placement, the vocabulary and whether to count bytes, in place of the costs' unit, to that. None: not known.
        keep: whether a searched order is kept on disk, and read from there where it has been: see ``kept``. Orders of a moment,
            quick ones and those of unequal microbatches, are not.
        trained: shares of B and of W of every stage that are left where not all trains; the first stages may have neither. Those
            of W count where costs are ``equal``.
        bounded: whether to refuse what would take hours: more than ``MOST_PASSES`` passes, or ``MOST_RANKS`` ranks.
    """

    schedule: str
    ranks: int
    microbatches: int
    costs: Costs | CostsOf | None = None
    chunks: int | None = None
    memory_limit: float | Sequence[float] | None = None
    _: KW_ONLY
    objective: Objective | str = GOAL
    recompute: Iterable[int] | StagesOf = ()
    fused: Iterable[int] | StagesOf = ()
    splits: int | None = None
    group: int | None = None
    vocabulary: Vocabulary | None = None
    offload: Offload | None = None
    host_limit: float | None = None
    overlap: bool = False
    quick: bool = False
    equal: StageCosts | EqualOf = EQUAL_PASSES
    layers: int | Model | None = None
    slow: Mapping[int, float] = field(default_factory=dict)
    unit: Unit = MICROBATCHES
    bounded: bool = False
    keep: bool = False
    trained: Sequence[tuple[float, float]] = ()
    beside: Beside | BesideOf | None = None

    def __new__(cls, *_: Any, **fields: Any) -> Request:
        """Raises:
        TypeError: a field is called as the flag of ``mpipe`` is that sets it.
        """
        if wrong := sorted(fields.keys() & _FLAGS):
            raise TypeError(f"Request({wrong[0]}={fields[wrong[0]]!r}): the field of --{wrong[0]} is {_FLAGS[wrong[0]]}")
        return super().__new__(cls)

    @property
    def variant(self) -> Variant:
        return Variant(self.schedule, self.chunks, self.group, self.splits)

    @property
    def facts(self) -> Facts:
        """All that it asks for, for the table of combinations, with rows of ``every_batch`` for who plans each."""
        passes = {"vocab_parallel": self.vocabulary, "offload": self.offload, "overlap_moe_expert_parallel_comm": self.overlap}
        return Facts(families.facts(self.schedule) | passes, every_batch=True, group=self.group, asked_splits=self.splits)

    @property
    def lowest_limit(self) -> float | None:
        """The memory limit of the rank that may hold least; None for any amount."""
        return min(self.memory_limit) if isinstance(self.memory_limit, Sequence) else self.memory_limit

    def of(self, variant: Variant) -> Request:
        """The same of another family, or of other sizes."""
        return replace(self, schedule=variant.name, chunks=variant.chunks, group=variant.group, splits=variant.splits)

    def problem(self) -> Problem:
        """Problem that the family is asked to plan.

        Raises:
            LimitTooLow: the memory limit is below what the family's name stands for.
            ChunksDoNotFit: the family does not come with that number of chunks.
            ValueError: the name is unknown, or a number is out of range or not for this family.
        """
        family = families.named(self.schedule)
        for name in ("ranks", "microbatches", "chunks", "splits", "group"):
            if not isinstance(value := getattr(self, name), Integral | None):
                raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
        if self.bounded:
            check_bounded(self.ranks, self.microbatches, (self.chunks or family.chunks) * (self.splits or family.splits))
        placement = families.placement(self.schedule, self.ranks, self.chunks)
        self.facts.refuse(GROUPS)
        return self.on(placement, family.splits if self.splits is None else self.splits, family)

    def on(self, placement: Placement, splits: int = 1, family: Family | None = None) -> Problem:
        """The problem on a placement; without a family for a schedule that exists already."""
        costs = self.costs_on(placement)
        problem = Problem(
            placement,
            self.microbatches,
            with_parts(costs) if self.overlap else costs,
            None if self.memory_limit is None else tuple(per_rank(self.memory_limit, placement.ranks)),
            Objective(self.objective),
            frozenset(self.recompute(placement) if callable(self.recompute) else self.recompute),
            frozenset(self.fused(placement) if callable(self.fused) else self.fused),
            splits,
            self.group,
            self.vocabulary,
            self.offload,
            self.host_limit,
            self.overlap,
            self.quick,
        )
        # With offloading the limit holds for the device: the schedule that is offloaded may take more.
        if family is None or self.offload:
            return problem
        beside = self.beside(placement, self.vocabulary) if callable(self.beside) else self.beside
        return replace(problem, limits=kept_limits(family, problem, beside))

    def costs_on(self, placement: Placement) -> Costs:
        """The costs on a placement."""
        costs = self.costs(placement) if callable(self.costs) else self.costs
        costs = costs or self.equal_costs(placement)
        return trained(costs, [(backward, 1.0) for backward, _ in self.trained]) if self.frozen else costs

    @property
    def frozen(self) -> int:
        """The first stages without B."""
        return next((stage for stage, (backward, _) in enumerate(self.trained) if backward), 0)

    def equal_costs(self, placement: Placement) -> Costs:
        """Costs of passes where no costs are given."""
        costs = uniform(placement, vocabulary=EQUAL_SHARDS if self.vocabulary else None)
        if callable(self.equal):
            costs = replace(costs, stages=tuple(self.equal(placement, self.vocabulary)))
        else:
            costs = replace(costs, stages=(self.equal.share(placement.chunks),) * len(costs.stages))
        return trained(costs, self.trained) if self.trained else costs

    def plan(self) -> Planned:
        """The family's schedule for this, which obeys every rule and stays within the limits.

        Raises:
            ValueError: see ``problem``, ``compose.solve`` and ``balance.balanced``.
        """
        if self.layers is not None:
            return self._balanced(self.layers)
        begin = time.perf_counter()
        problem = self.problem()
        keeps = self.keep and not (problem.quick or problem.costs.loads)
        search = partial(self._search, problem)
        schedule, by_rules = kept.order(self.schedule, problem, search) if keeps else search()
        seconds = time.perf_counter() - begin
        verify(schedule, waits_for_norm=waits_for_norm(problem))
        schedule = replace(schedule, frozen=self.frozen) if self.frozen else schedule
        return Planned(schedule, replace(problem, quick=False), self.variant, seconds, by_rules=by_rules)

    def _search(self, problem: Problem) -> kept.Order:
        schedule = solve(self.schedule, problem)
        return with_boundary(schedule, problem) if problem.costs.has_boundary else (schedule, None)

    def _balanced(self, layers: int | Model) -> Planned:
        """The schedule of the split of the layers that makes it shortest."""
        begin = time.perf_counter()
        placement = replace(self, layers=None).problem().placement
        model = layers if isinstance(layers, Model) else self._model(layers, placement)
        model = replace(model, slow=slow_stages(placement, self.slow))
        planned = balanced(placement, model, self.microbatches, lambda costs: replace(self, layers=None, costs=costs).plan())
        return replace(planned, seconds=time.perf_counter() - begin)

    def _model(self, layers: int, placement: Placement) -> Model:
        check_layers(layers, placement)
        return Model.of(self.costs_on(interleaved(placement.ranks, finer(placement))), layers)


def check_bounded(ranks: int, microbatches: int, parts: int = 1) -> None:
    """Refuse what would take hours.

    Args:
        parts: chunks of a rank, times slices of a microbatch.

    Raises:
        ValueError: there are more than ``MOST_PASSES`` passes, or ``MOST_RANKS`` ranks.
    """
    if 3 * math.prod(max(1, number) for number in (ranks, microbatches, parts)) > MOST_PASSES:
        raise ValueError(f"{ranks} ranks with {microbatches} microbatches are over {MOST_PASSES} passes; take fewer")
    if ranks > MOST_RANKS:
        raise ValueError(f"{ranks} ranks are over {MOST_RANKS}; take fewer")


def variants(ranks: int, names: Iterable[str] | None = None, chunks: Sequence[int] | None = None) -> list[Variant]:
    """The families to try, each with the numbers of chunks and groups that are worth trying: what ``auto``, ``mpipe compare`` and
    the page plan.

    Args:
        names: of the families; by default all that train on that number of ranks.
        chunks: the numbers of chunks per rank to try for families that take several; by default up to ``MOST_CHUNKS``.

    Raises:
        ValueError: a name is unknown.
    """
    listed = []
    for name in families.trained(ranks) if names is None else dict.fromkeys(names):
        family = families.named(name)
        numbers: Iterable[int | None] = [None]
        if family.any_chunks:
            numbers = range(family.chunks, MOST_CHUNKS + 1) if chunks is None else dict.fromkeys(chunks)
        listed += [Variant(name, number, group) for number in numbers for group in _groups(name, ranks)]
    return listed


def _groups(name: str, ranks: int) -> Iterator[int | None]:
    yield None
    between = -(-3 * ranks // 4)
    if name == "gis" and ranks // 2 < between < ranks:  # gis has groups of p microbatches, gis-h of p/2
        yield between
