"""A choice per pass between a split backward and a fused one, where BW takes less than B and W.

It does under tensor parallelism: the sums over tensor-parallel ranks run behind the weights' gradients in BW, and nothing hides
them in B. In return the gradient leaves later, which costs time where another rank waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from megatron.pipeline.planner.schedule.core.costs import StageCosts
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.planner.schedule.transforms.transform import changed
from megatron.pipeline.planner.schedule.transforms.trials import Trials

_LEAST = 0.01  # of B and W that BW must save to be tried
_TRIALS, _EFFORT = 150, 400_000  # the most simulations of the whole schedule, and passes in all of them

_PATTERNS = (2, 4, 8)  # distances of the microbatches that are changed, or of those that are not
_At = tuple[int, Pass]  # a rank and its B or BW


def saves(stage: StageCosts) -> bool:
    """Tell whether BW takes enough less on a stage than B and W for a choice."""
    return stage.value("fused") < (stage.backward + stage.weight) * (1 - _LEAST)


def shields(stage: StageCosts) -> bool:
    """Tell whether B and W take enough less for a choice where B has weight gradients behind its collectives."""
    return stage.value("saved") > (stage.backward + stage.weight) * _LEAST


def join(schedule: Schedule, problem: Problem) -> Schedule:
    """The same order, with a B and the W that follows it as BW where trials find that shorter."""
    pairs = (
        (rank, first)
        for rank, row in enumerate(schedule.passes)
        for first, second in pairwise(row)
        if first.kind is Kind.B and second == first._replace(kind=Kind.W)
    )
    cheaper = list(map(saves, problem.costs.stages))
    return _tried(schedule, problem, (at for at in pairs if cheaper[schedule.placement.stage(at[0], at[1].chunk)]), _joined)


def split(schedule: Schedule, problem: Problem) -> Schedule:
    """The same order, with a BW as B, from which the gradient leaves at once, and W, where trials find that shorter."""
    fused = ((rank, work) for rank, row in enumerate(schedule.passes) for work in row if work.kind is Kind.BW)
    return _tried(schedule, problem, fused, _split)


def _tried(
    schedule: Schedule, problem: Problem, places: Iterable[_At], change: Callable[[Schedule, Iterable[_At]], Schedule]
) -> Schedule:
    starts = [{timed.work: timed.start for timed in row} for row in simulate(schedule, problem.costs).ranks]
    waiting = sorted(places, key=lambda at: starts[at[0]][at[1]])
    if not waiting:
        return schedule
    # A rank that fuses some of its backwards at even distances works less, and its neighbours wait less than for all of them.
    some = (
        change(schedule, [at for at in waiting if (at[1].microbatch % every == 0) is chosen])
        for every in _PATTERNS
        for chosen in (True, False)
    )
    trials = Trials(schedule, problem, min(_TRIALS, max(16, _EFFORT // sum(map(len, schedule.passes)))))
    trials.begin(some)
    trials.halved(waiting, change)
    return trials.best


def _joined(schedule: Schedule, places: Iterable[_At]) -> Schedule:
    chosen = set(places)
    weights = {(rank, work._replace(kind=Kind.W)) for rank, work in chosen}

    def joined(rank: int, work: Pass) -> Iterator[Pass]:
        if (rank, work) not in weights:
            yield work._replace(kind=Kind.BW) if (rank, work) in chosen else work

    return changed(schedule, {rank for rank, _ in chosen}, joined)


def _split(schedule: Schedule, places: Iterable[_At]) -> Schedule:
    chosen = set(places)

    def halves(rank: int, work: Pass) -> Iterator[Pass]:
        if (rank, work) in chosen:
            yield work._replace(kind=Kind.B)
            yield work._replace(kind=Kind.W)
        else:
            yield work

    return changed(schedule, {rank for rank, _ in chosen}, halves)
