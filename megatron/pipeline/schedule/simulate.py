"""When every pass runs and what it holds, given the costs: an event-driven replay of a schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megatron.pipeline.schedule.costs import Costs
from megatron.pipeline.schedule.passes import Pass
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
    done: set[tuple[int, Pass]] = set()
    position = [0] * schedule.ranks
    blocked: dict[tuple[int, Pass], list[int]] = defaultdict(list)  # ranks that wait for a pass
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        for work in schedule.passes[rank][position[rank] :]:
            missing = next((needed for needed in schedule.predecessors(rank, work) if needed not in done), None)
            if missing is not None:
                blocked[missing].append(rank)
                break
            yield rank, work
            position[rank] += 1
            done.add((rank, work))
            runnable += blocked.pop((rank, work), [])
    for missing, ranks in blocked.items():
        raise Stuck(ranks[0], schedule.passes[ranks[0]][position[ranks[0]]], missing)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run every rank's passes in order, each as soon as the rank is free and its inputs are there.

    A result reaches another rank one ``costs.hop`` after its pass ended, and its own rank at once. Times are in the unit
    of the costs, from 0; costs given as ``Fraction`` give exact times.

    Raises:
        ValueError: the costs are for another number of stages, or the schedule cannot finish (the stuck pass is named).
    """
    check_stages(schedule.placement, costs)
    ends: dict[tuple[int, Pass], float] = {}
    free: list[float] = [0] * schedule.ranks
    ranks: list[list[Timed]] = [[] for _ in range(schedule.ranks)]
    for rank, work in dependency_order(schedule):
        start = free[rank]
        for source, needed in schedule.predecessors(rank, work):
            arrival = ends[source, needed] + (costs.hop if source != rank else 0)
            start = max(start, arrival)
        end = start + costs.stages[schedule.placement.stage(rank, work.chunk)].seconds(work.kind)
        ends[rank, work] = free[rank] = end
        ranks[rank].append(Timed(work, start, end))
    return Timeline(tuple(map(tuple, ranks)))


def activation_peaks(schedule: Schedule, costs: Costs) -> list[float]:
    """The most activation memory each rank holds at once, in the costs' unit.

    F allocates when it starts, B, W and BW free when they end. A rank runs its passes one after another, so the peak
    depends on their order alone.
    """
    check_stages(schedule.placement, costs)
    peaks: list[float] = []
    for rank, passes in enumerate(schedule.passes):
        held: float = 0
        peak: float = 0
        for work in passes:
            held += _change(schedule.placement, costs, rank, work)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def activation_profile(timeline: Timeline, placement: Placement, costs: Costs) -> list[list[tuple[float, float]]]:
    """For each rank, the moments at which its activation memory changes and what it holds from then on, in the costs' unit."""
    check_stages(placement, costs)
    profile: list[list[tuple[float, float]]] = []
    for rank, passes in enumerate(timeline.ranks):
        held: float = 0
        steps: list[tuple[float, float]] = []
        for work, start, end in passes:
            change = _change(placement, costs, rank, work)
            held += change
            steps.append((start if change > 0 else end, held))
        profile.append(steps)
    return profile


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


def _change(placement: Placement, costs: Costs, rank: int, work: Pass) -> float:
    return costs.stages[placement.stage(rank, work.chunk)].allocated(work.kind)
