"""Choice of the best schedule: every family, planned for the same request, and a choice among them.

planned, refused = candidates(Request(AUTO, ranks=8, microbatches=32, costs=costs_of, memory_limit=6), variants(ranks=8))
schedule = choose(planned).best.schedule
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.pipeline.planner.planning.compose import least_memory
from megatron.pipeline.planner.planning.planned import Planned, Variant
from megatron.pipeline.planner.planning.refusals import Refusal, Unit, in_unit, nothing_fits
from megatron.pipeline.planner.planning.request import MOST_CHUNKS, Request, variants
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.cutting import with_whole_vocabulary
from megatron.pipeline.planner.schedule.core.problem import ChunksDoNotFit, HostLimitTooLow, Objective, TooLow
from megatron.pipeline.planner.view.table import plain_table

NEAR = 1.001  # schedules this close to the shortest are as short: costs are not known better than that


def candidates(
    request: Request, wanted: Iterable[Variant], progress: Callable[[int, int], None] | None = None
) -> tuple[list[Planned], list[Refusal]]:
    """Plan and verify every schedule that is wanted.

    Args:
        progress: called with how many are planned, and of how many.

    Returns:
        The schedules, the shortest first, and of those equally short the one that holds least; and why there are no others.
    """
    planned: list[Planned] = []
    refused: list[Refusal] = []
    wanted = list(wanted)
    for done, variant in enumerate(wanted):
        if progress:
            progress(done, len(wanted))
        try:
            planned.append(request.of(variant).plan())
        except HostLimitTooLow as error:
            worded = in_unit(error, request.unit, variant.name, None, request.host_limit)
            refused.append(Refusal(variant, str(worded), _needs(request.of(variant))))
        except ValueError as error:
            refused.append(Refusal(variant, str(error), _needs(request.of(variant))))
    if progress:
        progress(len(wanted), len(wanted))
    planned.sort(key=lambda plan: (plan.length, plan.peak))
    return planned, refused


def least_limit(request: Request) -> float:
    """The least memory limit that the family has a schedule for, in the costs' unit.

    Raises:
        ValueError: there is none for these sizes and costs under any limit.
    """
    return least_memory(request.schedule, replace(request, memory_limit=None).problem())


def _needs(request: Request) -> float | None:
    """The memory that a refused family takes, if that is above the limit."""
    if request.lowest_limit is None:
        return None
    try:
        needs = least_limit(request)
    except ValueError:
        return None  # memory is not all that is wrong
    return needs if needs > request.lowest_limit else None


@dataclass(frozen=True)
class Choice:
    """The best of some schedules.

    Attributes:
        why_not: why the others are not the best, by variant.
        planned, refused: all that were tried.
    """

    best: Planned
    why_not: dict[Variant, str]
    planned: Sequence[Planned]
    refused: Sequence[Refusal]

    def table(
        self,
        unit: Unit,
        limit: float | None,
        time: Callable[[float], str] = "{:g}".format,
        memory: Callable[[float], str] | None = None,
    ) -> str:
        """All that were tried, the best first, and why each of the others is not taken.

        Args:
            unit: how the memory that a refused schedule needs is written, and the limit.
            limit: on memory, in the costs' unit.
            time, memory: how amounts of the costs' units are written; memory by default in ``unit``.
        """
        problem = self.best.problem
        goal, other = (Objective.MAKESPAN, Objective.SPAN) if problem.objective is Objective.MAKESPAN else Objective
        heads = ["schedule", goal, "bubble", other, "memory", "above bound", "why not"]
        cells = [
            [
                str(plan.variant),
                time(goal.length(plan.timeline)),
                f"{goal.bubble_rate(plan.timeline):.1%}",
                time(other.length(plan.timeline)),
                (memory or unit.number)(plan.peak),
                f"{plan.gap:z.1%}",
                self.why_not.get(plan.variant, "-"),
            ]
            for plan in sorted(self.planned, key=lambda plan: plan is not self.best)
        ]
        cells += [[str(refusal.variant), *["-"] * (len(heads) - 2), refusal.short(unit, limit)] for refusal in self.refused]
        return plain_table(heads, cells, words=1)


def choose(planned: Sequence[Planned], refused: Sequence[Refusal] = ()) -> Choice:
    """The shortest schedule; among those within 0.1 % of it the one that holds least, then the one that sends least, and then
    the simplest, whose family comes first in ``FAMILIES``.

    Args:
        planned: at least one.
    """
    limit = min(plan.length for plan in planned) * NEAR
    shortest = min((plan for plan in planned if plan.length <= limit), key=_ties)
    why_not = {}
    for plan in planned:
        if plan is shortest:
            continue
        if plan.length > limit:
            reason = f"{plan.length / shortest.length - 1:.1%} longer"
        else:
            more = ("holds more", "sends more", "less simple")
            differ = (mine != its for mine, its in zip(_ties(plan), _ties(shortest), strict=True))
            reason = f"as short, {next((what for what, differs in zip(more, differ, strict=True) if differs), 'no better')}"
        why_not[plan.variant] = reason
    return Choice(shortest, why_not, planned, refused)


def best(
    request: Request, tried: Iterable[Variant] | None = None, progress: Callable[[int, int], None] | None = None
) -> tuple[Planned, Choice | None]:
    """The schedule that a request asks for; for ``AUTO`` that of the best family, with the choice among all.

    Args:
        tried: the families that ``AUTO`` may take; by default all, with the request's number of chunks.
        progress: see ``candidates``.

    Raises:
        LimitTooLow: no schedule fits within the memory limit.
        ValueError: there is no schedule for another reason, or a field is for one family only.
    """
    if request.schedule != families.AUTO:
        try:
            return request.plan(), None
        except ChunksDoNotFit as error:
            raise ValueError(f"{error}: leave --chunks out") from None
        except TooLow as error:
            raise in_unit(error, request.unit, request.schedule, request.lowest_limit, request.host_limit) from None
    for field in ("group", "splits"):
        if getattr(request, field) is not None:
            raise ValueError(f"--{field} is for single families: leave it out with --schedule auto, which tries several")
    if tried is None:
        tried = variants(request.ranks, chunks=None if request.chunks is None else [request.chunks])
    planned, refused = candidates(request, tried, progress)
    if not planned:
        raise nothing_fits(refused, request.unit, request.lowest_limit)
    choice = choose(planned, refused)
    return choice.best, choice


def stock_at_its_best(costs: Costs, ranks: int, microbatches: int, layers: int | None = None) -> Planned:
    """The shortest plan of megatron-core's own schedules: 1F1B, and interleaved 1F1B with up to ``MOST_CHUNKS`` chunks per rank,
    the fewest chunks where they are equal.

    Args:
        costs: of any number of stages, cut again as ``Costs.of_depth`` does; a spread vocabulary goes back to the ends.
        layers: of the model: a number of chunks counts only if all stages get as many of them. None: every number counts.
    """
    gathered = with_whole_vocabulary(costs, ranks)
    request = Request("1f1b", ranks, microbatches, lambda placement: cutting.of_depth(gathered, placement.depth))
    shortest = request.plan()
    for chunks in range(2, MOST_CHUNKS + 1) if ranks > 1 and microbatches % ranks == 0 else ():
        if layers is None or layers % (ranks * chunks) == 0:
            planned = request.of(Variant("interleaved", chunks)).plan()
            shortest = planned if planned.value * NEAR < shortest.value else shortest
    return shortest


def _ties(plan: Planned) -> tuple[float, int, int]:
    """Order of schedules that are equally short: memory, messages per microbatch, and the family's place."""
    memory = float(f"{plan.peak:.9g}")  # sums of fractions such as 1/3 differ in their last bits
    messages = plan.problem.placement.chunks * plan.problem.splits
    return memory, messages, list(families.FAMILIES).index(plan.schedule.name)
