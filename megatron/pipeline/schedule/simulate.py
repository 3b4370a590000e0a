"""When every pass runs and what it holds, given the costs: an event-driven replay of a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron.pipeline.schedule.costs import Costs
from megatron.pipeline.schedule.passes import Kind, Pass
from megatron.pipeline.schedule.placement import Placement
from megatron.pipeline.schedule.schedule import Schedule
from megatron.pipeline.schedule.timeline import Timed, Timeline


class Stuck(ValueError):
    """A schedule cannot finish: ``rank`` can never start ``work``, because what it needs is never made before."""

    def __init__(self, rank: int, work: Pass, needed: tuple[int, Pass]) -> None:
        super().__init__(
            f"rank {rank} is stuck at {work}: it needs {needed[1]} of rank {needed[0]}, which cannot run before it; "
            "move one of the two, or add the missing pass"
        )
        self.rank, self.work = rank, work


def dependency_order(schedule: Schedule) -> Iterator[tuple[int, Pass]]:
    """Every (rank, pass), each after the passes it needs and after those that precede it on its rank.

    Raises:
        Stuck: after all passes that can run were yielded, some remain.
    """
    for rank, slot in _order(schedule, _Results(schedule)):
        yield rank, schedule.passes[rank][slot]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run every rank's passes in order, each as soon as the rank is free and its inputs are there.

    A result reaches another rank one ``costs.hop`` after its pass ended, and its own rank at once. Times are in the unit
    of the costs, from 0; costs given as ``Fraction`` give exact times.

    Raises:
        ValueError: the costs are for another number of stages, or the schedule cannot finish (the stuck pass is named).
    """
    check_stages(schedule.placement, costs)
    costs = costs.sliced(schedule.splits)
    results = _Results(schedule)
    seconds = [[{kind: costs.stages[stage].seconds(kind) for kind in Kind} for stage in row] for row in schedule.placement.stages]
    ends: list[float] = [0] * results.count
    free: list[float] = [0] * schedule.ranks
    ranks: list[list[Timed]] = [[] for _ in range(schedule.ranks)]
    for rank, slot in _order(schedule, results):
        work = schedule.passes[rank][slot]
        made, needed, remote = results.of(rank, work)
        start = free[rank]
        # What its own rank makes precedes the pass on it: only what comes from elsewhere can be late.
        if remote and ends[needed] + costs.hop > start:
            start = ends[needed] + costs.hop
        free[rank] = end = start + seconds[rank][work.chunk][work.kind]
        if made >= 0:
            ends[made] = end
        ranks[rank].append(Timed(work, start, end))
    return Timeline(tuple(map(tuple, ranks)))


class _Results:
    """What passes make for other stages, as numbers: the output of F, and the input gradient of B or BW, of every stage."""

    def __init__(self, schedule: Schedule) -> None:
        placement, self._slices = schedule.placement, schedule.slices
        self.count = 2 * (placement.last_stage + 1) * self._slices
        self._stages = placement.stages
        homes = [placement.home(stage)[0] for stage in range(placement.last_stage + 1)]
        # Of every stage: where the numbers begin of what it makes and of what it needs, and whether that comes from elsewhere.
        self._forward, self._backward = [], []
        for stage, rank in enumerate(homes):
            before = -1 if placement.is_first(stage) else (stage - 1) * self._slices
            after = -1 if placement.is_last(stage) else self.count // 2 + (stage + 1) * self._slices
            self._forward.append((stage * self._slices, before, before >= 0 and homes[stage - 1] != rank))
            made = self.count // 2 + stage * self._slices
            self._backward.append((made, after, after >= 0 and homes[stage + 1] != rank))

    def of(self, rank: int, work: Pass) -> tuple[int, int, bool]:
        """What a pass makes and what it needs, -1 for nothing; and whether another rank makes what it needs."""
        kind = work.kind
        if kind is Kind.F:
            made, needed, remote = self._forward[self._stages[rank][work.chunk]]
        elif kind is Kind.B or kind is Kind.BW:
            made, needed, remote = self._backward[self._stages[rank][work.chunk]]
        else:
            return -1, -1, False
        return made + work.microbatch, needed + work.microbatch if needed >= 0 else -1, remote


def _order(schedule: Schedule, results: _Results) -> Iterator[tuple[int, int]]:
    """Every (rank, slot) in an order in which they can run."""
    for rank, passes in enumerate(schedule.passes):
        _check_own_rank(schedule, rank, passes)
    done = bytearray(results.count)
    position = [0] * schedule.ranks
    blocked: dict[int, int] = {}  # the rank that waits for a result: every result is for one stage only
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        passes = schedule.passes[rank]
        for slot in range(position[rank], len(passes)):
            made, needed, _ = results.of(rank, passes[slot])
            if needed >= 0 and not done[needed]:
                position[rank] = slot
                blocked[needed] = rank
                break
            yield rank, slot
            if made >= 0:
                done[made] = 1
                if made in blocked:
                    runnable.append(blocked.pop(made))
    for rank in blocked.values():
        work = schedule.passes[rank][position[rank]]
        raise Stuck(rank, work, list(schedule.predecessors(rank, work))[-1])


def _check_own_rank(schedule: Schedule, rank: int, passes: tuple[Pass, ...]) -> None:
    """Raises:
    Stuck: a pass precedes one on its own rank whose result it needs.
    """
    seen: set[Pass] = set()
    for work in passes:
        if work.kind is not Kind.F:
            needed = next(iter(schedule.predecessors(rank, work)))
            if needed[1] not in seen:
                raise Stuck(rank, work, needed)
        seen.add(work)


def activation_peaks(schedule: Schedule, costs: Costs) -> list[float]:
    """The most activation memory each rank holds at once, in the costs' unit.

    F allocates when it starts, B, W and BW free when they end. A rank runs its passes one after another, so the peak
    depends on their order alone.
    """
    return [max(itertools.accumulate(changes, initial=0)) for changes in activation_changes(schedule, costs)]


def activation_profile(schedule: Schedule, timeline: Timeline, costs: Costs) -> list[list[tuple[float, float]]]:
    """For each rank, the moments at which its activation memory changes and what it holds from then on, in the costs' unit."""
    profile: list[list[tuple[float, float]]] = []
    for passes, changes in zip(timeline.ranks, activation_changes(schedule, costs), strict=True):
        held: float = 0
        steps: list[tuple[float, float]] = []
        for (_, start, end), change in zip(passes, changes, strict=True):
            held += change
            steps.append((start if change > 0 else end, held))
        profile.append(steps)
    return profile


def activation_changes(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """For each rank, what every pass allocates (positive) or frees (negative), in the costs' unit."""
    check_stages(schedule.placement, costs)
    stages = costs.sliced(schedule.splits).stages
    table = {
        (stage, kind, recomputed): cost.allocated(kind, recomputed)
        for stage, cost in enumerate(stages)
        for kind in Kind
        for recomputed in (False, True)
    }
    changes: list[list[float]] = []
    for rank, passes in enumerate(schedule.passes):
        mine = schedule.placement.stages[rank]
        recomputed = {(work.microbatch, work.chunk) for work in passes if work.kind is Kind.R}
        changes.append(
            [table[mine[work.chunk], work.kind, (work.microbatch, work.chunk) in recomputed] for work in passes]
            if recomputed
            else [table[mine[work.chunk], work.kind, False] for work in passes]
        )
    return changes


def check_stages(placement: Placement, costs: Costs) -> None:
    """Raises:
    ValueError: the costs are for another number of stages than the placement has.
    """
    stages = placement.ranks * placement.chunks
    if len(costs.stages) != stages:
        raise ValueError(
            f"costs of {len(costs.stages)} stages for a placement of {stages} ({placement.ranks} ranks with "
            f"{placement.chunks} chunks each); give one StageCosts per stage"
        )
