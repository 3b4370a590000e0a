"""Problem that a schedule is planned for: the shape, what passes cost, what memory there is, and what is to be short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron.pipeline.planner.combinations.rows import SCHEDULES
from megatron.pipeline.planner.combinations.table import Facts
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.timeline import Lengths, Timeline

__all__ = ["LimitTooLow", "Objective", "Problem"]


class Objective(StrEnum):
    """Objective: the time that an iteration is said to take."""

    SPAN = "span"  # where iterations interlock: the longest, over ranks, from a rank's first pass to its last
    MAKESPAN = "makespan"  # where they do not: from the first pass on any rank to the last pass on any rank

    def length(self, timeline: Timeline | Lengths) -> float:
        """Length of a timeline that is to be short."""
        return timeline.span if self is Objective.SPAN else timeline.makespan

    def bubble_rate(self, timeline: Timeline) -> float:
        return timeline.span_bubble_rate if self is Objective.SPAN else timeline.bubble_rate


class TooLow(ValueError):
    """A limit is too low.

    Attributes:
        least: the limit that suffices, in the costs' unit.
    """

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least

    def __reduce__(self) -> tuple[type[TooLow], tuple[str, float]]:
        return type(self), (str(self), self.least)


class LimitTooLow(TooLow):
    """A family has no schedule within a memory limit."""


class HostLimitTooLow(TooLow):
    """A limit of host memory has no room for one copy."""


class ChunksDoNotFit(ValueError):
    """A schedule has another number of chunks per rank; the caller adds where the number was given."""


GOAL = Objective.MAKESPAN  # what a training makes short, unless post-validation lets its iterations interlock


@dataclass(frozen=True)
class Problem:
    """One instance of pipeline scheduling: families plan it, ``bound`` and ``exact`` say how well it can be done.

    Attributes:
        placement: which stage each (rank, chunk) holds.
        microbatches: of one iteration, at least 1.
        costs: of every stage, for a whole microbatch; with the loads of all, where microbatches are unequal.
        limits: the most activation memory that each rank may hold, in the costs' unit; None for any amount.
        objective: what is to be short.
        recompute: the stages that run R, for every microbatch.
        fused: the stages whose backward is BW, for every microbatch, where a family splits it elsewhere.
        splits: into how many slices along the sequence every microbatch is cut, for families that can.
        group: how many microbatches go through a chunk before the next one's turn, for families that group them.
        vocabulary: how the vocabulary is spread over all ranks; None where the ends of the model have it.
        offload: how much of the activations may go to host memory; ``limits`` are of what is on the device.
        host_limit: the most that a rank may have in host memory, in the costs' unit; None for any amount.
        overlap: whether a forward and a backward may run as one (``core.braids``).
        quick: whether the first good plan is wanted at once, of families that search and of all that tries changes.

    Raises:
        ValueError: sizes do not fit each other or are out of range.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    limits: tuple[float, ...] | None = None
    objective: Objective = Objective.SPAN
    recompute: frozenset[int] = frozenset()
    fused: frozenset[int] = frozenset()
    splits: int = 1
    group: int | None = None
    vocabulary: Vocabulary | None = None
    offload: Offload | None = None
    host_limit: float | None = None
    overlap: bool = False
    quick: bool = False

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"a schedule needs at least 1 microbatch, got {self.microbatches}")
        self.costs.check_placement(self.placement)
        self.costs.check_microbatches(self.microbatches)
        stages = self.placement.depth
        if self.limits is not None:
            per_rank(self.limits, self.placement.ranks)
        for name, chosen in (("recompute", self.recompute), ("fuse", self.fused)):
            unknown = sorted(stage for stage in chosen if not 0 <= stage < stages)
            if unknown:
                raise ValueError(f"cannot {name} stage {unknown[0]}: the stages are 0..{stages - 1}")
        if self.splits < 1:
            raise ValueError(f"a microbatch can be cut into 1 slice or more, got {self.splits}")
        if self.host_limit is not None and not (self.offload and self.host_limit > 0):
            problem = f"must be above 0, got {self.host_limit:g}" if self.offload else "needs offloading, and there is none"
            raise ValueError(f"a limit of host memory {problem}")
        if self.vocabulary:
            sizes = {"pipeline_model_parallel_size": self.placement.ranks}
            Facts(sizes, vocab_parallel=self.vocabulary, splits=self.splits).refuse(SCHEDULES)

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    def value(self, timeline: Timeline | Lengths) -> float:
        return self.objective.length(timeline)

    def first(self, count: int) -> Problem:
        """The problem of no more than this many microbatches, for what the others do not change; all of them where they are
        unequal."""
        return self if self.costs.loads else replace(self, microbatches=min(self.microbatches, count))

    def microbatch_memory(self, rank: int) -> float:
        """Memory of the largest microbatch on a rank when all its chunks have run F (and R), and B where that allocates: with
        that much every problem can be planned.

        With recompute the least that is needed can be below this: see ``bound.least_limit``.
        """
        held = 0.0
        for stage in self.placement.stages[rank]:
            cost = self.costs.stages[stage]
            held += cost.activation + (0.0 if stage in self.fused else cost.backward_allocates)
        return held * self.costs.largest.memory


def per_rank(memory_limit: float | Sequence[float], ranks: int) -> list[float]:
    """One limit for every rank, from one number for all or from one number each.

    Raises:
        ValueError: not one number per rank, or a number that is negative or NaN.
    """
    limits = list(memory_limit) if isinstance(memory_limit, Sequence) else [memory_limit] * ranks
    if len(limits) != ranks or not all(limit >= 0 for limit in limits):
        raise ValueError(f"a memory limit must be one number of at least 0, or one for each of {ranks} ranks, got {memory_limit}")
    return limits
