"""GIS and GIS-H: interleaved 1F1B in groups of g microbatches, p/2 <= g <= p, with W split off and run where there is time.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization", which names the two: g = p
for ``gis``, half of it (rounded up) for ``gis-h``; ``group`` sets any other. A smaller group holds less, and waits longer for
its first microbatch to come round to the next chunk.

Every rank holds at most g(v-1) + p chunks of a microbatch, each 1/v of what a rank allocates for it, whatever the costs are.
With F = B = W on every stage, no hops and m a multiple of g, the bubble of the span and of the makespan is at most

    p-1 + v(p-g)

passes of one chunk, and exactly that many, p-1, for g = p. That is never more than the published 2(p-1) + (p-g)(v-1), because
g is at least 1. For other m the last group is smaller: the memory is the same, the bubble longer.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

from megatron.pipeline.schedule.core.passes import STAGE_KINDS, Kind, Pass
from megatron.pipeline.schedule.core.placement import interleaved
from megatron.pipeline.schedule.core.problem import Problem
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.families.family import Family, Order
from megatron.pipeline.schedule.families.interleaved import chunk_by_chunk
from megatron.pipeline.schedule.time.simulate import simulate

# How late W may make a pass whose input arrives meanwhile, as a share of W. Which one is best depends on the costs.
_PATIENCE = (0, 0.5, 1)


def plan(problem: Problem) -> Order:
    """Groups as large as the pipeline, unless the problem sets their size."""
    return _best(problem, problem.ranks if problem.group is None else problem.group)


def plan_half(problem: Problem) -> Order:
    """Groups half as large as the pipeline, unless the problem sets their size."""
    return _best(problem, -(-problem.ranks // 2) if problem.group is None else problem.group)


def _best(problem: Problem, group: int) -> Order:
    """The best of a few ways to place W.

    Raises:
        ValueError: the group is smaller than half the pipeline, or larger than the pipeline.
    """
    ranks = problem.ranks
    least = -(-ranks // 2)
    if not least <= group <= ranks:
        raise ValueError(f"with {ranks} ranks a group is {least} to {ranks} microbatches, got {group}; leave --group out for one")

    def value(order: Order) -> float:
        return problem.value(simulate(Schedule("gis", problem.placement, problem.microbatches, order), problem.costs))

    return min((_Run(problem, group, patience).order() for patience in _PATIENCE), key=value)


class _Run:
    """One iteration, simulated, in which every rank chooses what to run when it is free.

    The order of the F is fixed on every rank, and so is that of the B. F goes first, but rank r has at most g(v-1) + p-r
    microbatches between F and B, as many as 1F1B would have; with those of which only W is due, at most g(v-1) + p. W runs when
    neither F nor B can, or when there is no memory for F without it.

    It always ends: that F waits for an earlier B or W is one more order between passes. One where every rank runs all the F
    that it may have in flight, then B, W and F in turn, keeps all of them.
    """

    def __init__(self, problem: Problem, group: int, patience: float) -> None:
        self.placement, self.hop, self.patience = problem.placement, problem.costs.hop, patience
        ranks, chunks = problem.ranks, self.placement.chunks
        items = list(chunk_by_chunk(problem.microbatches, group, chunks))
        self.forwards = [Pass(Kind.F, *item) for item in items]
        self.backwards = [Pass(Kind.B, microbatch, chunks - 1 - chunk) for microbatch, chunk in items]
        self.seconds = {kind: [cost.seconds(kind) for cost in problem.costs.stages] for kind in STAGE_KINDS}
        self.backward = [
            (Kind.R,) * (stage in problem.recompute) + (Kind.BW if stage in problem.fused else Kind.B,)
            for stage in range(len(problem.costs.stages))
        ]
        self.last = self.placement.last_stage
        self.most = group * (chunks - 1) + ranks
        self.rows: list[list[Pass]] = [[] for _ in range(ranks)]
        self.free: list[float] = [0] * ranks
        self.ran = {Kind.F: [0] * ranks, Kind.B: [0] * ranks}
        self.due: list[deque[Pass]] = [deque() for _ in range(ranks)]
        # When the input of F or B of a stage and a microbatch is there, once that is known.
        self.arrival: dict[tuple[Kind, int, int], float] = {(Kind.F, 0, i): 0 for i in range(problem.microbatches)}
        self.events: list[tuple[float, int]] = [(0, rank) for rank in range(ranks)]

    def order(self) -> Order:
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free[rank] <= now and (work := self._choice(rank, now)) is not None:
                self._start(rank, work, now)
        return tuple(map(tuple, self.rows))

    def _choice(self, rank: int, now: float) -> Pass | None:
        """What the rank runs now; None to wait, for an arrival or the end of a pass, either of which is an event."""
        in_flight, due = self.ran[Kind.F][rank] - self.ran[Kind.B][rank], self.due[rank]
        forward, work = self._next(Kind.F, rank) if in_flight < self.most - rank else (math.inf, None)
        full = work is not None and in_flight + len(due) >= self.most
        if forward <= now and not full:
            return work
        backward, work = self._next(Kind.B, rank)
        if backward <= now:
            return work
        if not due:
            return None
        seconds = self.seconds[Kind.W][self.placement.stages[rank][due[0].chunk]]
        late = now + seconds - min(forward, backward)
        return due[0] if full or late <= self.patience * seconds else None

    def _next(self, kind: Kind, rank: int) -> tuple[float, Pass | None]:
        """The next F or B of a rank, and when it can run: infinite where that is not known, or none is left."""
        works, number = self.forwards if kind is Kind.F else self.backwards, self.ran[kind][rank]
        if number == len(works):
            return math.inf, None
        work = works[number]
        return self.arrival.get((kind, self.placement.stages[rank][work.chunk], work.microbatch), math.inf), work

    def _start(self, rank: int, work: Pass, now: float) -> None:
        kind, microbatch, chunk, _ = work
        stage = self.placement.stages[rank][chunk]
        runs = self.backward[stage] if kind is Kind.B else (kind,)
        self.rows[rank] += [work if run is kind else Pass(run, microbatch, chunk) for run in runs]
        end = self.free[rank] = now + sum(self.seconds[run][stage] for run in runs)
        heapq.heappush(self.events, (end, rank))
        if kind is Kind.W:
            self.due[rank].popleft()
            return
        self.ran[kind][rank] += 1
        if runs[-1] is Kind.B:
            self.due[rank].append(Pass(Kind.W, microbatch, chunk))
        if kind is Kind.F and stage == self.last:
            self.arrival[Kind.B, stage, microbatch] = end
        elif (after := stage + (1 if kind is Kind.F else -1)) >= 0:
            receiver, _ = self.placement.home(after)
            self.arrival[kind, after, microbatch] = there = end + (self.hop if receiver != rank else 0)
            heapq.heappush(self.events, (there, receiver))


def _family(name: str, plan: Callable[[Problem], Order]) -> Family:
    return Family(name, interleaved, plan, chunks=2, any_chunks=True, least_chunks=2, grouped=True, suggested=name == "gis")


FAMILY, FAMILY_HALF = _family("gis", plan), _family("gis-h", plan_half)
