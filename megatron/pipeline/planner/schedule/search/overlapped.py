"""Orders made of braids from the start: every rank pairs the forwards and backwards that are ready, and waits for a partner.

A search for an order of single passes leaves few pairs that can be braided, or the wrong ones. In braids every hop takes about as
long as both halves: to keep every rank braiding, about twice as many microbatches are on their way as in 1F1B, on a V half a one
more (DualPipeV's p + 1/2). Here a clock runs the ranks, each of which decides by a ``PairingPolicy`` when it is free; the
shortest order of many policies is taken. This clock lets both messages of a braid leave at its end: ranks that decide in step
find more pairs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from megatron.pipeline.planner.schedule.core.kinds import BRAIDED
from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.slack import SLACK

_EFFORT = 150_000  # passes that all trials together may place
_SHARES = (1.0, 1.25, 0.75, 1.5, 0.5, 2.0)  # of the microbatches that keep every rank braiding


class PairingPolicy(NamedTuple):
    """Rules by which a rank decides.

    Attributes:
        caps: by stage, how many microbatches it may hold when a forward has run alone; one that is braided may be one more.
        patience: how long a pass that is ready waits for a partner, in braids.
        deep_forwards, deep_backwards: whether the last chunk comes first where several are ready, or the first.
        split: which backwards leave their weights' gradients to a W: none (0), those without a partner (1), or all (2).
        spare: of the limits, in activations of a stage: with less room ranks may get less in each other's way.
    """

    caps: tuple[int, ...]
    patience: float
    deep_forwards: bool
    deep_backwards: bool
    split: int
    spare: int = 0


def list_schedule_overlapped(problem: Problem) -> Order | None:
    """The shortest order of braids within the problem's limits that is found: of a grid of policies, and of changes to the best.

    None for what braids do not go with, for unequal microbatches, and where the limits have no room for one on every stage.
    """
    if problem.recompute or problem.splits > 1 or problem.costs.loads:
        return None
    trials = _PairingTrials(problem)
    last = problem.placement.last_stage
    splits = (1, 0, 2) if len(problem.fused) <= last else (0,)
    spares = (0, 1, 2) if problem.limits else (0,)
    for spare, patience, split, forwards, backwards in product(spares, (0.5, 0.0), splits, (True, False), (True, False)):
        for share in _SHARES:
            ahead = share * 2 / problem.placement.chunks
            caps = tuple(1 + math.floor(ahead * (last - stage) + 1e-6) for stage in range(last + 1))
            trials.run(PairingPolicy(caps, patience, forwards, backwards, split, spare))
    while trials.left and trials.best:
        value = trials.value
        for policy in _near(trials.best, problem.placement):
            trials.run(policy)
        if trials.value >= value:
            break
    return trials.order


def _near(policy: PairingPolicy, placement: Placement) -> Iterator[PairingPolicy]:
    """Policies that differ in one decision."""
    alone = [[stage] for stage in range(len(policy.caps))]
    together = [list(stages) for stages in zip(*placement.stages, strict=True)]  # those of one chunk, on all ranks
    for stages, by in product([*together, *alone], (1, -1)):
        caps = tuple(cap + by * (stage in stages) for stage, cap in enumerate(policy.caps))
        if min(caps) > 0:
            yield policy._replace(caps=caps)
    for patience in (0.0, 0.25, 0.5, 0.75, 1.0, 1.5):
        yield policy._replace(patience=patience)
    for spare in range(5):
        yield policy._replace(spare=spare)
    yield policy._replace(deep_forwards=not policy.deep_forwards)
    yield policy._replace(deep_backwards=not policy.deep_backwards)


class _PassSeconds(NamedTuple):
    """Those of a problem, each computed once: a run asks for one at every decision."""

    braid: Callable[[int, Kind, int], tuple[float, float]]
    seconds: Callable[[Kind, int], float]
    allocated: Callable[[Kind, int], float]


class _PairingTrials:
    """The best of the policies that were tried."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._costs = _PassSeconds(cache(problem.costs.braid), cache(problem.costs.seconds), cache(problem.costs.allocated))
        self._tried: set[PairingPolicy] = set()
        self.left = max(48, _EFFORT // (2 * problem.microbatches * len(problem.costs.stages)))
        self.best: PairingPolicy | None = None
        self.order: Order | None = None
        self.value = math.inf

    def run(self, policy: PairingPolicy) -> None:
        if not self.left or policy in self._tried:
            return
        self.left -= 1
        self._tried.add(policy)
        run = _PairingRun(self._problem, self._costs, policy)
        if (order := run.order()) is not None and (value := run.value()) < self.value:
            self.best, self.order, self.value = policy, order, value


class _PairingRun:
    """One iteration under a policy, in simulated time."""

    def __init__(self, problem: Problem, costs: _PassSeconds, policy: PairingPolicy) -> None:
        placement, self.problem, self.costs, self.policy = problem.placement, problem, costs, policy
        last, count = placement.last_stage, problem.microbatches
        self.stages: Sequence[Sequence[int]] = placement.stages
        self.homes = [placement.home(stage) for stage in range(last + 1)]
        # By stage and microbatch: when what a forward or a backward needs has arrived, as far as that is known.
        self.inputs = [[0.0 if stage == 0 else math.inf] * count for stage in range(last + 1)]
        self.gradients = [[math.inf] * count for _ in range(last + 1)]
        self.forwards, self.backwards = [0] * (last + 1), [0] * (last + 1)  # that have started
        self.caps = policy.caps
        self.weights: list[list[tuple[int, int]]] = [[] for _ in range(placement.ranks)]  # stage and microbatch
        self.held = [0.0] * placement.ranks
        spare = policy.spare * max(stage.activation for stage in problem.costs.stages)
        self.limits = [limit - spare for limit in problem.limits or (math.inf,) * placement.ranks]
        self.rows: list[list[Pass]] = [[] for _ in range(placement.ranks)]
        self.free = [0.0] * placement.ranks
        self.starts = [math.inf] * placement.ranks
        self.waking = [(0.0, rank) for rank in range(placement.ranks)]
        of_braids = [sum(costs.braid(stage, Kind.FBW, stage)) for stage in range(last + 1)]
        self.patience = policy.patience * sum(of_braids) / len(of_braids)

    def order(self) -> Order | None:
        """The passes of every rank; None where ranks would wait for each other for ever."""
        while self.waking:
            moment, rank = heapq.heappop(self.waking)
            if moment >= self.free[rank]:
                self._decide(rank, moment)
        done = all(count == self.problem.microbatches for count in self.backwards) and not any(self.weights)
        return tuple(map(tuple, self.rows)) if done else None

    def value(self) -> float:
        """Value that the problem minimises."""
        spans = [end - start for start, end in zip(self.starts, self.free, strict=True)]
        return max(spans) if self.problem.objective is Objective.SPAN else max(self.free) - min(self.starts)

    def _decide(self, rank: int, moment: float) -> None:
        """Start what a free rank runs next, if anything."""
        forwards = self._waiting(rank, self.inputs, self.forwards, self.policy.deep_forwards)
        forwards = [(arrival, stage) for arrival, stage in forwards if self._has_room(rank, stage)]
        backwards = self._waiting(rank, self.gradients, self.backwards, self.policy.deep_backwards)
        here = [stage for arrival, stage in forwards if arrival <= moment]
        back = [stage for arrival, stage in backwards if arrival <= moment]
        pairs = [(one, other) for one in here for other in back if one != other or self.forwards[one] != self.backwards[one]]
        alone = [stage for stage in here if self._held(stage) < self.caps[stage]]
        later = moment + self.patience
        if pairs:
            self._start(rank, moment, *pairs[0])
        elif back and not any(arrival <= later for arrival, _ in forwards):
            self._start(rank, moment, None, back[0])
        elif alone and not any(arrival <= later for arrival, _ in backwards):
            self._start(rank, moment, alone[0], None)
        elif self.weights[rank]:
            self._start_weights(rank, moment)

    def _waiting(self, rank: int, arrivals: list[list[float]], started: list[int], deep: bool) -> list[tuple[float, int]]:
        """When the next pass of every chunk could start, and its stage."""
        stages = reversed(self.stages[rank]) if deep else self.stages[rank]
        return [(arrivals[stage][started[stage]], stage) for stage in stages if started[stage] < self.problem.microbatches]

    def _has_room(self, rank: int, stage: int) -> bool:
        """Tell whether a forward may start, at least with a backward beside it."""
        if self._held(stage) > self.caps[stage]:
            return False
        costs = self.problem.costs.stages
        reserved = sum(costs[later].activation for later in self.stages[rank] if later > stage and not self._held(later))
        return self.held[rank] + costs[stage].activation + reserved <= self.limits[rank] * (1 + SLACK)

    def _held(self, stage: int) -> int:
        """Microbatches between the start of F and of the backward."""
        return self.forwards[stage] - self.backwards[stage]

    def _start(self, rank: int, moment: float, forward: int | None, backward: int | None) -> None:
        """A forward of one stage, a backward of one, or a braid of both."""
        costs, last = self.costs, self.problem.placement.last_stage
        kind = None if backward is None else self._backward_kind(rank, backward, forward is not None)
        seconds = 0.0
        if forward is not None and backward is not None and kind:
            kind = BRAIDED[kind]
            seconds = sum(costs.braid(forward, kind, backward))
        elif forward is not None:
            seconds = costs.seconds(Kind.F, forward)
        elif backward is not None and kind:
            seconds = costs.seconds(kind, backward)
        end = moment + seconds
        self.starts[rank] = min(self.starts[rank], moment)
        if forward is not None:
            number = self._run(rank, Kind.F, forward, self.forwards)
            if forward < last:
                self._send(self.inputs, rank, forward + 1, number, end)
            else:
                self.gradients[forward][number] = end
        if backward is not None and kind:
            number = self._run(rank, kind, backward, self.backwards)
            if not kind.finishes_weights:
                self.weights[rank].append((backward, number))
            if backward:
                self._send(self.gradients, rank, backward - 1, number, end)
        self._finish(rank, end)

    def _backward_kind(self, rank: int, stage: int, in_braid: bool) -> Kind:
        """B or BW: W and BW of a chunk are in microbatch order."""
        whole = self.policy.split < (2 if in_braid else 1) or stage in self.problem.fused
        return Kind.BW if whole and all(other != stage for other, _ in self.weights[rank]) else Kind.B

    def _start_weights(self, rank: int, moment: float) -> None:
        stage, number = self.weights[rank].pop(0)
        self.rows[rank].append(Pass(Kind.W, number, self.homes[stage][1]))
        self.held[rank] += self.costs.allocated(Kind.W, stage)
        self._finish(rank, moment + self.costs.seconds(Kind.W, stage))

    def _run(self, rank: int, kind: Kind, stage: int, started: list[int]) -> int:
        number = started[stage]
        started[stage] += 1
        self.rows[rank].append(Pass(kind, number, self.homes[stage][1]))
        self.held[rank] += self.costs.allocated(kind, stage)
        return number

    def _send(self, arrivals: list[list[float]], rank: int, stage: int, number: int, end: float) -> None:
        peer = self.homes[stage][0]
        arrivals[stage][number] = end + self.problem.costs.message(rank, peer)
        heapq.heappush(self.waking, (arrivals[stage][number], peer))

    def _finish(self, rank: int, end: float) -> None:
        self.free[rank] = end
        heapq.heappush(self.waking, (end, rank))
