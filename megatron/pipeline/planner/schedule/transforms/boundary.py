"""Boundaries of iterations: by Megatron-LM's rules, and planned so that the period is short.

A plan of a rank is the order of its passes and a number of buckets. RS begin within the last pass that fills them. Behind all
passes the rank steps its buckets in the order of their use, and each AG follows its step, or all steps where costs say so: a
training loop's optimizer takes its step between two iterations (``patches/distrib_optimizer.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

from megatron.pipeline.planner.schedule.core.boundary import Turn, first_and_last, with_turns
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.slack import within
from megatron.pipeline.planner.schedule.time.cycle import Cycle, Steady
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks

BUCKETS = (1, 2, 4)  # of a chunk, to try
_TRIALS = 1000  # simulations of changes
_COUNTS = (1, 2, 3, 4, 6, 8, 12)  # of last W of a chunk that are moved at a time

Passes = tuple[Pass, ...]


@dataclass(frozen=True)
class Rules:
    """Megatron-LM's rules (megatron-core 0.16 to 0.19: ``schedules.py``, ``distributed_data_parallel.py``).

    The first chunk of the first rank has several buckets, every other chunk one.

    Attributes:
        overlap_grad_reduce: RS begin within the last pass that fills their buckets; otherwise behind all passes.
        overlap_param_gather: AG begin with the first pass that uses their chunk, which takes one bucket after another; otherwise
            all run before the first pass.
        aligned: both start at about the same time on all ranks: a chunk's RS as many backwards after its last one as there are
            ranks before; with one chunk, behind all passes on all ranks but the first. The AG of the first two chunks before the
            first pass, that of another one as many forwards before the first forward of the chunk before it; that of one chunk
            begins as without. The last layers' bucket is gathered first, and so the pass waits for all.
    """

    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    aligned: bool = False


# Gathers that forwards ask for run one rank after another: without their overlap one chunk per rank is faster.
MEGATRON = tuple(Rules(overlap_param_gather=gathers, aligned=aligned) for gathers in (True, False) for aligned in (False, True))


def waits_for_norm(problem: Problem) -> bool:
    """Tell whether steps wait for the norm of all gradients: where iterations do not interlock."""
    return problem.objective is Objective.MAKESPAN


def by_rules(schedule: Schedule, rules: Rules, buckets: int) -> list[Turn]:
    """Turns of all ranks under Megatron-LM's rules; it steps once all of a rank's gradients are reduced.

    Args:
        buckets: of the first chunk of the first rank.
    """
    return [_by_rules(_Completed(passes), rules, buckets, rank) for rank, passes in enumerate(schedule.passes)]


def _by_rules(own: _Completed, rules: Rules, buckets: int, rank: int) -> Turn:
    count, one = len(own.passes), len(own.by_use) == 1
    counts = {chunk: buckets if (rank, chunk) == (0, 0) else 1 for chunk in own.by_use}
    backwards = [slot for slot, work in enumerate(own.passes) if work.kind.finishes_weights]
    forwards = [slot for slot, work in enumerate(own.passes) if work.kind is Kind.F]
    early, behind = dict[int, list[Pass]](), dict[int, list[Pass]]()  # by number of passes before
    for chunk in own.by_completion:
        made = _of(Kind.RS, chunk, counts[chunk])[::-1]
        if rules.overlap_grad_reduce and (not rules.aligned or (one and not rank)):
            _reduced_within(behind, own, chunk, made)
            continue
        later = [slot + 1 for slot in backwards if slot >= own.last[chunk]][rank : rank + 1]
        behind.setdefault(later[0] if later and rules.overlap_grad_reduce and not one else count, []).extend(made)
    end = behind.setdefault(count, [])
    for chunk in own.by_use:
        end += _of(Kind.OPT, chunk, counts[chunk])
    for use, chunk in enumerate(own.by_use):
        place = 0
        if rules.overlap_param_gather and (one or not rules.aligned):
            place = own.first[chunk] + 1
        elif rules.overlap_param_gather and use > 1:
            before = sum(slot < own.first[own.by_use[use - 1]] for slot in forwards)
            place = forwards[max(0, before - rank)]
        gathers = _of(Kind.AG, chunk, counts[chunk])
        asked = rules.overlap_param_gather and not rules.aligned
        (early.setdefault(place, []) if place else end).extend(gathers if asked else gathers[::-1])
    return _merged(own.passes, early, behind)


def _reduced_within(behind: dict[int, list[Pass]], own: _Completed, chunk: int, reductions: list[Pass]) -> None:
    """Have a chunk's RS, of which the last is of the bucket that is complete last, begin within its last pass."""
    behind.setdefault(own.last[chunk], []).extend(reductions[:-1])
    behind.setdefault(own.last[chunk] + 1, []).extend(reductions[-1:])


def _of(kind: Kind, chunk: int, buckets: int) -> list[Pass]:
    return [Pass(kind, bucket, chunk) for bucket in range(buckets)]


def _merged(passes: Passes, early: dict[int, list[Pass]], behind: dict[int, list[Pass]]) -> Turn:
    """A turn.

    Args:
        early, behind: of the boundary before and of the own one, by the number of the rank's passes before them.
    """
    made: list[Pass] = []
    for place, work in enumerate((*passes, None)):
        made += *early.get(place, ()), *behind.get(place, ())
        made += [] if work is None else [work]
    return Turn(tuple(made))


class _Completed:
    """The passes of a rank, and what its chunks wait for."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.first, self.last = first_and_last(passes)

    @cached_property
    def by_completion(self) -> list[int]:
        return sorted(self.last, key=self.last.__getitem__)

    @cached_property
    def by_use(self) -> list[int]:
        return sorted(self.first, key=self.first.__getitem__)


@lru_cache(maxsize=1024)
def _planned(passes: Passes, buckets: int, at_once: bool) -> Turn:
    """A rank's plan: see above."""
    rank, behind = _Completed(passes), dict[int, list[Pass]]()
    for chunk in rank.by_completion:
        _reduced_within(behind, rank, chunk, _of(Kind.RS, chunk, buckets)[::-1])
    steps, gathers = ([work for chunk in rank.by_use for work in _of(kind, chunk, buckets)] for kind in (Kind.OPT, Kind.AG))
    pairs = [steps, gathers] if at_once else zip(steps, gathers, strict=True)
    behind.setdefault(len(passes), []).extend(itertools.chain(*pairs))
    return _merged(passes, {}, behind)


def megatron(schedule: Schedule, problem: Problem, rules: Iterable[Rules] = MEGATRON) -> tuple[Schedule, Steady]:
    """The schedule with the boundary of Megatron-LM's rules that has the shortest period, with the best number of buckets."""
    plain = replace(schedule, boundary=())
    cycle = Cycle(plain, problem.costs, waits_for_norm(problem))
    made = [by_rules(plain, rule, buckets) for rule in rules for buckets in BUCKETS]
    found = [(steady, each) for each in made if (steady := cycle.steady(each)) is not None]
    steady, best = min(found, key=lambda each: each[0])
    return with_turns(plain, best), steady


def with_boundary(schedule: Schedule, problem: Problem) -> tuple[Schedule, float]:
    """The schedule with a planned boundary, and perhaps with W in another order near the end, and the period under Megatron-LM's
    rules: the plan's is never longer. No rank holds more than before, or than the limits."""
    best, by_rules = megatron(schedule, problem)
    search = _Search(replace(schedule, boundary=()), problem)
    if not problem.quick:
        search.improve()
    return search.schedule if search.steady < by_rules else best, by_rules.period


class _Search:
    """Changes of plans that are kept where they make the period shorter."""

    def __init__(self, schedule: Schedule, problem: Problem) -> None:
        self._original, self._problem = schedule, problem
        self._cycle = Cycle(schedule, problem.costs, waits_for_norm(problem))
        self._plan = partial(_planned, at_once=problem.costs.at_once)
        self._left = _TRIALS
        peaks = activation_peaks(schedule, problem.costs)
        self._limits = [max(each) for each in zip(peaks, problem.limits or peaks, strict=True)]
        self._passes = list(schedule.passes)
        found = [(steady, buckets) for buckets in BUCKETS if (steady := self._of(self._passes, buckets)) is not None]
        self.steady, self._buckets = min(found)

    @property
    def schedule(self) -> Schedule:
        """The best so far."""
        return with_turns(self._original, [self._plan(passes, self._buckets) for passes in self._passes])

    def improve(self) -> None:
        """Change all ranks at once, and then one after another, until nothing helps."""
        ranks, before = range(len(self._passes)), None
        for move in self._moves():
            self._try(move, ranks)
        while before != self.steady and self._left > 0:
            before = self.steady
            for rank, move in itertools.product(ranks, self._moves()):
                self._try(move, [rank])

    def _moves(self) -> Iterator[Callable[[Passes], Passes]]:
        """Moves of a chunk's W in a rank's passes: with one chunk none matters."""
        chunks = range(self._original.placement.chunks)
        for chunk in chunks if len(chunks) > 1 else ():
            yield partial(hurried, chunk=chunk)
            for count in _COUNTS:
                if count <= self._original.slices:
                    yield partial(at_once, chunk=chunk, count=count)

    def _try(self, move: Callable[[Passes], Passes], ranks: Iterable[int]) -> None:
        changed = list(self._passes)
        for rank in ranks:
            if not _fuses(changed[rank]):
                changed[rank] = move(changed[rank])
        if changed != self._passes and self._left > 0:
            self._left -= 1
            if (steady := self._of(changed, self._buckets)) is not None and steady < self.steady and self._fits(changed):
                self.steady, self._passes = steady, changed

    def _fits(self, passes: Sequence[Passes]) -> bool:
        return within(activation_peaks(replace(self._original, passes=tuple(passes)), self._problem.costs), self._limits)

    def _of(self, passes: Sequence[Passes], buckets: int) -> Steady | None:
        return self._cycle.steady([self._plan(own, buckets) for own in passes])


def hurried(passes: Passes, chunk: int) -> Passes:
    """A rank's passes with every W of a chunk as early, among the places of all W, as its B allows."""
    slots = [slot for slot, work in enumerate(passes) if work.kind is Kind.W]
    waiting = [passes[slot] for slot in slots]
    ready, made, begin = set[tuple[int, int]](), list(passes), 0
    for slot in slots:
        ready |= {work[1:] for work in passes[begin:slot] if work.kind.sends_gradient}
        begin = slot
        there = [work for work in waiting if work[1:] in ready]
        made[slot] = next((work for work in there if work.chunk == chunk), there[0])
        waiting.remove(made[slot])
    return tuple(made)


def at_once(passes: Passes, chunk: int, count: int) -> Passes:
    """A rank's passes with the places of the last W of a chunk directly behind their B; all W of it keep their order."""
    of_chunk = [work for work in passes if work.kind is Kind.W and work.chunk == chunk]
    last = {work[1:]: work for work in of_chunk[-count:]}
    made: list[Pass] = []
    for work in passes:
        if last.get(work[1:]) != work:
            made.append(work)
            made += [last[work[1:]]] if work.kind.sends_gradient and work[1:] in last else []
    in_order = iter(of_chunk)
    return tuple(next(in_order, work) if work.kind is Kind.W and work.chunk == chunk else work for work in made)


def _fuses(passes: Passes) -> bool:
    """Tell whether there is any BW: W and BW of a chunk keep their order."""
    return any(work.kind.finishes_weights and work.kind is not Kind.W for work in passes)
