"""Result of a request: a schedule that obeys every rule, the problem that it answers, and how good it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from megatron.pipeline.planner.schedule.core.boundary import turns
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.posting import leads, message_buffers
from megatron.pipeline.planner.schedule.lower.program import Program
from megatron.pipeline.planner.schedule.lower.slots import Slots, slots_of
from megatron.pipeline.planner.schedule.optimum.bound import own_bound
from megatron.pipeline.planner.schedule.optimum.period import period_bound
from megatron.pipeline.planner.schedule.rules.verify_slots import verify_slots
from megatron.pipeline.planner.schedule.time.cycle import Cycle
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.boundary import waits_for_norm
from megatron.pipeline.planner.view.notebook import svg


@dataclass(frozen=True)
class Variant:
    """A family with the sizes that it leaves to its user; None for the family's own."""

    name: str
    chunks: int | None = None
    group: int | None = None
    splits: int | None = None

    def __str__(self) -> str:
        given = (("v", self.chunks), ("g", self.group), ("S", self.splits))
        return " ".join([self.name, *(f"{letter}={number}" for letter, number in given if number is not None)])


@dataclass(frozen=True)
class Split:
    """Split of a model's layers over its stages.

    Attributes:
        layers: of every stage, in the model's order.
        flag, layout: with which Megatron-LM splits it so.
        even: what the family's schedule of the even split takes; None where that does not fit into the memory limit.
        written: what that of the split takes that was given; None where none was, or as above.
    """

    layers: tuple[int, ...]
    flag: str
    layout: str
    even: float | None = None
    written: float | None = None


@dataclass(frozen=True, eq=False)
class Planned:
    """A schedule that has been verified, with its programs, its times and its bound, each computed at first use.

    Attributes:
        problem: its limits are those that the family kept: the user's, or what the family's name stands for.
        variant: the family and the sizes that were asked for; for a schedule from a file its name.
        seconds: what planning took; None for a schedule from a file.
        split: of the layers over the stages, where that was planned too.
        order: of the microbatches, where that was planned too: which of those given is in every place.
        by_rules: the period of the family's own order under Megatron-LM's rules for what ranks do between two iterations; None
            where the costs do not say what that takes.
    """

    schedule: Schedule
    problem: Problem
    variant: Variant
    seconds: float | None = None
    split: Split | None = None
    order: tuple[int, ...] | None = None
    by_rules: float | None = None

    @property
    def title(self) -> str:
        """Title above a drawing."""
        offloaded = ", offloaded" if self.schedule.has_copies else ""
        steady = "" if self.period is None else f", two iterations of {self.period:.4g} each"
        return f"{self.schedule.name}{offloaded}{steady}"

    def _repr_svg_(self) -> str | None:
        """Its picture, for notebooks."""
        return svg(self.timeline, self.title, self.schedule.splits)

    @property
    def slow(self) -> dict[str, float]:
        """See ``Costs.slow``."""
        return self.problem.costs.slow(self.schedule.placement)

    @property
    def memory_limit(self) -> float | tuple[float, ...] | None:
        """The most activation memory of a rank, in the costs' unit: one number, or one for each rank where they differ. None for
        any amount."""
        limits = self.problem.limits
        if limits is None or math.inf in limits:
            return None
        return limits[0] if len(set(limits)) == 1 else limits

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        return lower(self.schedule, self.problem.costs, self.timeline)

    @cached_property
    def leads(self) -> tuple[tuple[int, ...], ...]:
        """For every rank, how far a GPU's host may be ahead at each pass (``posting.leads``)."""
        rows = ({work: end - start for work, start, end in row} for row in self.timeline.ranks)
        return tuple(map(leads, self.programs, rows))

    @cached_property
    def message_buffers(self) -> int:
        """The most messages whose memory a rank needs at a time on a GPU, in addition to what ``peaks`` counts."""
        return max(map(message_buffers, self.programs, self.leads))

    def slots(self, posted: bool = False) -> tuple[Slots, ...]:
        """Slots of every rank, checked: which microbatches share memory in turn (``slots_of``, and there for ``posted``)."""
        found = tuple(slots_of(*each, posted) for each in zip(self.programs, self.schedule.placement.stages, strict=True))
        verify_slots(self.schedule, self.programs, found, posted)
        return found

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.problem.costs)

    @property
    def value(self) -> float:
        """The objective, span or makespan, in the costs' unit."""
        return self.problem.value(self.timeline)

    @cached_property
    def cycle(self) -> Cycle:
        """Iterations one after another, where the schedule has a boundary."""
        return Cycle(self.schedule, self.problem.costs, waits_for_norm(self.problem))

    @cached_property
    def period(self) -> float | None:
        """Seconds from the start of an iteration to the next one's, in steady training; None without a boundary."""
        steady = self.cycle.steady(turns(self.schedule)) if self.schedule.boundary else None
        return steady and steady.period

    @cached_property
    def period_bound(self) -> float:
        """A period that no order within the schedule's own memory can beat: see ``optimum.period``."""
        return period_bound(self.schedule, self.problem)

    @property
    def period_gap(self) -> float | None:
        """Distance of the period above that bound, as a share of the bound."""
        return None if self.period is None else above(self.period, self.period_bound)

    @property
    def length(self) -> float:
        """Length that is to be short: the period where it is known, else the objective."""
        return self.value if self.period is None else self.period

    @property
    def shown(self) -> Timeline:
        """Timeline to draw: two iterations of steady training where the schedule has a boundary, else one."""
        return self.cycle.timeline(turns(self.schedule)) if self.schedule.boundary else self.timeline

    @cached_property
    def peaks(self) -> Sequence[float]:
        """The most that each rank holds, in the costs' unit."""
        return activation_peaks(self.schedule, self.problem.costs)

    @property
    def peak(self) -> float:
        """The most that any rank holds, in the costs' unit."""
        return max(self.peaks)

    @cached_property
    def braids(self) -> int:
        return sum(work.kind.row.braided is not None for row in self.schedule.passes for work in row)

    @cached_property
    def communication(self) -> tuple[float, float]:
        """Seconds of what layers communicate, a mean over ranks: those in which a rank computes nothing meanwhile, and all."""
        schedule, costs = self.schedule, self.schedule.costs(self.problem.costs)
        whole_costs = replace(schedule, shielded=frozenset()).costs(self.problem.costs)

        @cache
        def lanes(stage: int, kind: Kind, number: int) -> tuple[float, float]:
            """Seconds in which a pass computes, and those that it would communicate with nothing behind its collectives."""
            return (costs.of(number).stages[stage].lanes(kind)[0], whole_costs.of(number).stages[stage].lanes(kind)[1])

        exposed = whole = 0.0
        for stages, timed in zip(schedule.placement.stages, self.timeline.ranks, strict=True):
            for work, start, end in timed:
                if not (work.kind.is_of_vocabulary or work.kind.is_copy):
                    computing, communicating = lanes(stages[work.chunk], work.kind, work.microbatch if costs.loads else 0)
                    exposed += end - start - computing
                    whole += communicating
        return max(0.0, exposed) / schedule.ranks, whole / schedule.ranks

    @cached_property
    def bound(self) -> float:
        """Time that no order of the passes within the schedule's own memory can beat: see ``own_bound``."""
        return own_bound(self.schedule, self.problem)

    @property
    def gap(self) -> float:
        """Distance of the schedule above that bound, as a share of the bound."""
        return above(self.value, self.bound)


def above(value: float, bound: float) -> float:
    """Distance of a value above a bound, as a share of the bound."""
    return value / bound - 1 if bound else 0.0
