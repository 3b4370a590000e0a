"""GIS and GIS-H: interleaved 1F1B in groups of g microbatches, p/2 <= g <= p, with W split off and run where there is time.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization", names the two: g = p for
``gis``, half of it (rounded up) for ``gis-h``; ``group`` sets another g. A smaller group holds less memory, and waits longer
until its first microbatch returns for the next chunk.

For any costs every rank holds at most g(v-1) + p chunks of a microbatch, each 1/v of what a rank allocates for it. With
F = B = W on every stage, no hops and m a multiple of g, the bubble of the span and of the makespan is at most

    p-1 + v(p-g)

passes of one chunk, and exactly that many, p-1, for g = p. That is never more than the published 2(p-1) + (p-g)(v-1), because
g is at least 1. For other m the last group is smaller: the memory is the same, the bubble longer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.planner.schedule.core.placement import interleaved
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.families.family import Family
from megatron.pipeline.planner.schedule.families.interleaved import chunk_by_chunk
from megatron.pipeline.planner.schedule.time.clock import Clock
from megatron.pipeline.planner.schedule.time.links import rows_of
from megatron.pipeline.planner.schedule.time.simulate import simulate

F, R, B, W, BW = Kind.F, Kind.R, Kind.B, Kind.W, Kind.BW

# By how much of its duration W may delay an F or B whose input arrives while it runs. The best share depends on the costs.
_PATIENCE = (0, 0.5, 1)


def plan(problem: Problem) -> Order:
    """Groups as large as the pipeline, unless the problem sets their size."""
    return _best(problem, problem.ranks if problem.group is None else problem.group)


def plan_half(problem: Problem) -> Order:
    """Groups half as large as the pipeline, unless the problem sets their size."""
    return _best(problem, -(-problem.ranks // 2) if problem.group is None else problem.group)


def _best(problem: Problem, group: int) -> Order:
    """The best of a few ways to place W, each also as if links were alike: what waits for a slow one may hold up the rest.

    Raises:
        ValueError: the group is smaller than half the pipeline, or larger than the pipeline.
    """
    ranks = problem.ranks
    least = -(-ranks // 2)
    if not least <= group <= ranks:
        raise ValueError(f"with {ranks} ranks a group is {least} to {ranks} microbatches, got {group}: leave the group out")

    def value(order: Order) -> float:
        return problem.value(simulate(Schedule("gis", problem.placement, problem.microbatches, order), problem.costs))

    problems = dict.fromkeys((problem, replace(problem, costs=replace(problem.costs, links=()))))
    return min((_PassChoices(one, group, patience).order() for one in problems for patience in _PATIENCE), key=value)


class _PassChoices:
    """Choice of the pass that a free rank runs.

    The order of the F is fixed on every rank, and so is that of the B. F goes first, but rank r has at most g(v-1) + p-r
    microbatches between F and B, as many as 1F1B would have; with those of which only W is due, at most g(v-1) + p. W runs when
    neither F nor B can, or when F has no memory before it.

    This cannot deadlock. The memory rule makes F wait for an earlier B or W, and the order in which every rank runs all the
    F that it may have in flight, then B, W and F in turn, satisfies all these waits.
    """

    def __init__(self, problem: Problem, group: int, patience: float) -> None:
        self.placement, self.patience = problem.placement, patience
        ranks, chunks = problem.ranks, self.placement.chunks
        items = list(chunk_by_chunk(problem.microbatches, group, chunks))
        self.forwards = [Pass(F, *item) for item in items]
        self.backwards = [Pass(B, microbatch, chunks - 1 - chunk) for microbatch, chunk in items]
        self.own_forwards = [work._replace(kind=F) for work in self.backwards]  # which the backwards need on their own rank
        self.backward_kinds = [
            (R,) * (stage in problem.recompute) + (BW if stage in problem.fused else B,)
            for stage in range(len(problem.costs.stages))
        ]
        self.most = group * (chunks - 1) + ranks
        self.ran = {F: [0] * ranks, B: [0] * ranks}
        self.due: list[deque[Pass]] = [deque() for _ in range(ranks)]
        schedule = Schedule("gis", self.placement, problem.microbatches, ((),) * ranks)
        self.clock = Clock(ranks, rows_of(schedule, problem.costs))

    def order(self) -> Order:
        self.clock.run(self._choose)
        return tuple(map(tuple, self.clock.ends))

    def _choose(self, rank: int, now: float) -> Sequence[Pass]:
        """Choose what the rank runs now; empty to wait for an arrival or the end of a pass."""
        in_flight, due = self.ran[F][rank] - self.ran[B][rank], self.due[rank]
        forward, work = self._next(F, rank) if in_flight < self.most - rank else (math.inf, None)
        full = work is not None and in_flight + len(due) >= self.most
        if work is not None and forward <= now and not full:
            self.ran[F][rank] += 1
            return (work,)
        backward, work = self._next(B, rank)
        if work is not None and backward <= now:
            self.ran[B][rank] += 1
            kinds = self.backward_kinds[self.placement.stages[rank][work.chunk]]
            _, microbatch, chunk = work
            if kinds[-1] is B:
                due.append(Pass(W, microbatch, chunk))
            return [Pass(kind, microbatch, chunk) for kind in kinds]
        if not due:
            return ()
        seconds = self.clock.seconds(rank, due[0])
        late = now + seconds - min(forward, backward)
        return (due.popleft(),) if full or late <= self.patience * seconds else ()

    def _next(self, kind: Kind, rank: int) -> tuple[float, Pass | None]:
        """The next F or B of a rank, and when it can run: infinite if that is not known, or if all have run."""
        works, number = self.forwards if kind is F else self.backwards, self.ran[kind][rank]
        if number == len(works):
            return math.inf, None
        if kind is B and self.own_forwards[number] not in self.clock.ends[rank]:
            return math.inf, works[number]
        return self.clock.arrival(rank, works[number]), works[number]


def _family(name: str, plan: Callable[[Problem], Order]) -> Family:
    return Family(name, interleaved, plan, chunks=2, any_chunks=True, least_chunks=2, grouped=True, suggested=name == "gis")


FAMILY, FAMILY_HALF = _family("gis", plan), _family("gis-h", plan_half)
