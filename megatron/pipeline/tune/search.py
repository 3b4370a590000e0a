"""Search for the best trainings on a cluster: layouts, schedules and measures that save memory, each planned and simulated.

First everything that is planned in a moment, in every layout; then all schedules of the best layouts; then the others, in the
order of what they could take at best. What more memory would make faster is tried again with what saves some. What a search finds
depends on its budget of work, and neither on the time that this work takes nor on how many processes share it.
"""

from __future__ import annotations

import heapq
import multiprocessing
import os
import signal
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple, TypeAlias

from megatron.pipeline.planner import end_with_parent, view
from megatron.pipeline.tune.candidate import Candidate
from megatron.pipeline.tune.costs import CandidateCosts
from megatron.pipeline.tune.iteration import Dominated, Failed, Infeasible, Outcome, Result, least_seconds, outcome_of, work
from megatron.pipeline.tune.layouts import Layouts

BEST = 10
WORK = 2_000  # a search's budget, see ``work``: some half a minute of one core

_AHEAD = 16  # candidates that are planned while others begin, for any number of processes: so all of them begin with the same
_WORTH = 0.995  # costs are not known better: what could gain less than this over the best of its layout is not planned

Place: TypeAlias = tuple[int, ...]


@dataclass
class SearchResult:
    """The outcome of a search.

    Attributes:
        results: all that fit, the fastest first.
        misfits: what does not fit.
        tried, beaten, left_out: how many were planned, of how many it was clear that they are slower, and how many were not
            looked at.
        work: what planning took, as ``work`` counts it.
        stopped: how many searches the time limit, or who runs them, has ended.
        interrupted: how many of these who runs them.
        refused: why flags contradict each other, with how often.
        failed: why candidates could not be planned, with how often.
        bound: seconds that nothing which may fit is below, in any order of its passes, planned or not.
    """

    results: list[Result] = field(default_factory=list)
    misfits: list[Infeasible] = field(default_factory=list)
    tried: int = 0
    beaten: int = 0
    left_out: int = 0
    work: float = 0.0
    stopped: int = 0
    interrupted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    bound: float = float("inf")

    def best(self, wanted: int = BEST) -> list[Result]:
        """The fastest of every layout, the fastest first; of layouts that are the same in time and memory, the simplest."""
        fastest: dict[Place, Result] = {}
        for result in self.results:
            fastest.setdefault(place(result.candidate), result)
        different: dict[tuple[str, str], Result] = {}
        for result in fastest.values():
            different.setdefault((f"{result.seconds:.6g}", f"{result.fullest.total:.6g}"), result)
        return list(different.values())[:wanted]

    def joined(self, other: SearchResult) -> SearchResult:
        """This search and another one of the same layouts as one; of equal results, those of this one first."""
        both: dict[str, Any] = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        bound = min(self.bound, other.bound)
        return SearchResult(**both | {"results": sorted(both["results"], key=_rank), "bound": bound})

    def front(self) -> list[Result]:
        """The results that are not dominated in time and memory, the fastest first."""
        return view.pareto(self.results, lambda result: (result.seconds, result.fullest.total))


def place(candidate: Candidate) -> Place:
    """The layout of a candidate."""
    sizes = candidate.sizes
    return (*(sizes[name] for name in ("cp", "tp", "ep", "pp", "dp")), candidate.args.micro_batch_size)


class _QueueEntry(NamedTuple):
    """A candidate in the queue: the lowest ``turn`` goes first, then the lowest bound on its seconds; and its ``work``.

    It may stand for a layout, as its first candidate: ``others`` are the rest then, and the bound is that of all of them.
    """

    turn: int
    least: float
    number: int
    one: CandidateCosts
    work: float
    others: Iterator[Candidate] | None = None

    @property
    def place(self) -> Place:
        return place(self.one.candidate)


@dataclass
class _Waiting:
    """The candidates in the queue: those that are planned at once, and by layout those that take longer."""

    layouts: Layouts
    quick: list[_QueueEntry] = field(default_factory=list)
    slow: defaultdict[Place, list[_QueueEntry]] = field(default_factory=lambda: defaultdict(list))
    interlocked: set[Place] = field(default_factory=set)
    known: int = 0
    numbers: Iterator[int] = field(default_factory=count)

    def add(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            self.add_one(CandidateCosts(self.layouts.cluster, candidate))

    def add_one(self, one: CandidateCosts) -> None:
        self.back(_QueueEntry(_turn(one), least_seconds(one), next(self.numbers), one, work(one)))
        self.known += 1

    def add_layout(self, candidates: Iterator[Candidate]) -> None:
        """Put a layout into the queue: what can be the fastest opens it (``open``), and all else need not even be listed."""
        for first in islice(candidates, 1):
            least = (one := CandidateCosts(self.layouts.cluster, first)).least_in_layout()
            if least == float("inf"):  # one stands for all, unless they may fit in fewer bits
                self.add_one(one)
                self.add(candidates if self.layouts.choices.numerics else ())
            else:
                self.back(_QueueEntry(0, least, next(self.numbers), one, 0.0, candidates))
                self.known += 1

    def open(self, layout: _QueueEntry) -> None:
        """Put all candidates of a layout into the queue."""
        assert layout.others is not None
        self.known -= 1
        self.add_one(layout.one)
        self.add(layout.others)

    def back(self, entry: _QueueEntry) -> None:
        """Put an entry into the queue, again."""
        heapq.heappush(self.slow[entry.place] if entry.turn else self.quick, entry)

    def next(self, best: Sequence[Result], idle: bool) -> _QueueEntry | None:
        """The next entry to plan; None where that depends on running ones, or where the queue is empty.

        Args:
            best: of every layout that is to be finished before the others.
            idle: whether nothing runs.
        """
        if self.quick:
            return heapq.heappop(self.quick)
        heaps = [self.slow[place(result.candidate)] for result in best]
        if any(heaps):
            return heapq.heappop(min(filter(None, heaps), key=lambda heap: heap[0].turn))
        finished = [result.candidate for result in best if place(result.candidate) not in self.interlocked]
        if finished and not idle:
            return None
        if finished:  # all but this: would the best of these layouts be faster if its iterations interlocked?
            self.interlocked.update(map(place, finished))
            self.add(other for candidate in finished for other in self.layouts.interlocked(candidate))
            return self.next(best, idle)
        others = [heap for heap in self.slow.values() if heap]
        return heapq.heappop(min(others)) if others else None

    @property
    def least(self) -> float:
        """A lower bound on the seconds of all of them."""
        return min((entry.least for entry in self), default=float("inf"))

    def __iter__(self) -> Iterator[_QueueEntry]:
        return chain(self.quick, *self.slow.values())

    def __len__(self) -> int:
        return len(self.quick) + sum(map(len, self.slow.values()))


@dataclass(frozen=True)
class SearchLimits:
    """Limits of a search.

    Attributes:
        processes: that plan; by default as many as there are cores. They change how long it takes, and nothing else.
        budget: the most ``work`` that planning may take; what exceeds it is left out.
        seconds: after which the search ends with what it has by then, which depends on the machine; as at a KeyboardInterrupt.
        beat: seconds of an iteration that is known already.
        error: times the fastest's seconds: what may be as good. What cannot be is not planned, and of what takes long to plan
            only what may be the fastest is.
    """

    processes: int | None = None
    budget: float = float("inf")
    seconds: float = float("inf")
    beat: float = float("inf")
    error: float = float("inf")

    def most(self, best: Sequence[Result], turn: int) -> float:
        """Seconds above which a candidate is not planned, in any layout."""
        fastest = min([self.beat, *(result.seconds for result in best[:1])])
        return fastest if turn and self.error < float("inf") else fastest * self.error


def search(
    layouts: Layouts,
    stock: bool = False,
    wanted: int = BEST,
    limits: SearchLimits = SearchLimits(),
    progress: Callable[[int, int, float], None] = lambda done, known, share: None,
) -> SearchResult:
    """Find the fastest trainings.

    Args:
        stock: of those that megatron-core's own schedules can run, instead of ours.
        wanted: how many layouts are to be ranked; slower ones are not planned.
        progress: called with the numbers of candidates that are finished and that are known, and which share of the time that
            may be: a unit of ``work`` and a candidate beside it take about the same.

    Raises:
        BrokenProcessPool: a process has died.
    """
    layouts = replace(layouts, refused=Counter())
    with _pool(limits.processes or os.cpu_count() or 1) as pool:
        running = _Running(layouts, wanted, limits, pool)
        found, waiting = running.found, running.waiting
        try:
            for layout in layouts:
                waiting.add_layout(layouts.candidates(layout, stock))
                progress(0, waiting.known, 0.0)
            while running.begin():
                running.end_one()
                progress(*running.share())
        except (TimeoutError, KeyboardInterrupt) as stop:
            found.left_out += len(waiting) + len(running.entries)
            found.bound = min([found.bound, waiting.least, *(entry.least for entry, _ in running.entries)])
            found.stopped, found.interrupted = 1, isinstance(stop, KeyboardInterrupt)
            _give_up(pool)
    found.results.sort(key=_rank)
    return found


class _Running:
    """Candidates that are planned now, in the order in which they began; what was found, and what waits.

    Args:
        wanted: as of ``search``.
    """

    def __init__(self, layouts: Layouts, wanted: int, limits: SearchLimits, pool: ProcessPoolExecutor) -> None:
        self._layouts, self._wanted, self._limits, self._pool = layouts, wanted, limits, pool
        self._until = time.monotonic() + limits.seconds
        self.found, self.waiting = SearchResult(refused=layouts.refused), _Waiting(layouts)
        self.entries: deque[tuple[_QueueEntry, Future[Outcome]]] = deque()
        self._remakes: dict[tuple[object, ...], float] = {}  # least seconds of layouts, with what they make again
        self._counted, self._left = -_AHEAD, 0.0  # when the work that is left was counted, and how much it was

    @property
    def _work(self) -> float:
        """Candidates that have been planned, and that are: of the latter some may turn out to be no work."""
        return self.found.work + sum(entry.work for entry, _ in self.entries)

    def begin(self) -> bool:
        """Begin what can begin; returns whether anything runs."""
        best = self.found.best(self._wanted)
        while len(self.entries) < _AHEAD and (entry := self.waiting.next(best, idle=not self.entries)):
            threshold = min(_threshold(best, entry.place, self._wanted), self._limits.most(best, entry.turn))
            if entry.least > threshold:
                self.found.beaten += 1
                self.found.bound = min(self.found.bound, entry.least)
            elif entry.others is not None:
                self.waiting.open(entry)
            elif self._work + entry.work <= self._limits.budget:
                future = self._pool.submit(outcome_of, entry.one, threshold)
                self.entries.append((entry, future))
            elif self.entries:
                self.waiting.back(entry)
                break
            else:
                self.found.left_out += 1
                self.found.bound = min(self.found.bound, entry.least)
        return bool(self.entries)

    def end_one(self) -> None:
        """Wait for the first that began, whichever ends first: so no machine's pace matters.

        Raises:
            TimeoutError: the time is over before.
        """
        entry, future = self.entries[0]
        left = self._until - time.monotonic()
        if left <= 0 or not wait([future], left if left < float("inf") else None).done:
            raise TimeoutError
        outcome = future.result()
        self.entries.popleft()
        self.found.work += entry.work if _took_planning(outcome) else 0.0
        for candidate in _taken(self.found, outcome, self._layouts, partial(self._worth, entry)):
            self.waiting.add_one(one := CandidateCosts(self._layouts.cluster, candidate))
            if (key := _remade(candidate, vars(candidate.args))) not in self._remakes:
                self._remakes[key] = one.least_in_layout()

    def _worth(self, entry: _QueueEntry, changes: Mapping[str, Any]) -> bool:
        """Tell whether what saves memory may be fast enough: copies take no less than the candidate without, and recomputation
        no less than the mean over all ranks, which is known from another schedule of the layout."""
        offloads = "offload" in changes
        least = entry.least if offloads else self._remakes.get(_remade(entry.one.candidate, changes), 0.0)
        if fast := least <= self._limits.most(self.found.results, 3 * offloads):
            return fast
        self.found.beaten += 1
        self.found.bound = min(self.found.bound, least)
        return fast

    def share(self) -> tuple[int, int, float]:
        """The argument of ``progress``: what is slower than the fastest so far, as far as is known, takes no time."""
        done = self.found.tried + self.found.beaten + self.found.failed.total()
        if done >= self._counted + _AHEAD or not self.waiting:  # not at every call: thousands may wait
            most = self._limits.most(self.found.results, 0)
            left = [entry.work for entry in self.waiting if entry.least <= most]
            self._counted, self._left = done, len(left) + min(sum(left), self._limits.budget - self.found.work)
        worked, running = done + self.found.work, len(self.entries) + self._work - self.found.work
        return done, self.waiting.known, worked / (worked + running + self._left or 1.0)


def _remade(candidate: Candidate, flags: Mapping[str, Any]) -> tuple[object, ...]:
    """The layout of a candidate with what its backwards make again, or would with other flags."""
    own = candidate.args.expert_tensor_parallel_size, candidate.args.grad_reduce_in_bf16
    return place(candidate), own, flags.get("recompute_granularity"), *(flags.get("recompute_modules") or ())


def _taken(
    found: SearchResult, outcome: Outcome, layouts: Layouts, worth: Callable[[Mapping[str, Any]], bool] = bool
) -> Iterator[Candidate]:
    """Record the outcome of a candidate, and return the candidates to try because of it: see ``Layouts.remedies``."""
    if isinstance(outcome, Failed):
        found.failed[outcome.reason] += 1
        return
    if isinstance(outcome, Dominated):
        found.beaten += 1
    else:
        found.tried += 1
    if isinstance(outcome, Infeasible):
        found.misfits.append(outcome)
    else:
        found.bound = min(found.bound, outcome.bound)
    if isinstance(outcome, Result):
        found.results.append(outcome)
        found.results.sort(key=_rank)
    if isinstance(outcome, Infeasible) and outcome.state_too_large:
        yield from layouts.narrower(outcome.candidate)
    elif isinstance(outcome, Infeasible) or outcome.memory_bound:
        yield from layouts.remedies(outcome.candidate, worth)


def _took_planning(outcome: Outcome) -> bool:
    if isinstance(outcome, Infeasible):
        return not outcome.state_too_large
    return not isinstance(outcome, Dominated) or outcome.planned


def _threshold(best: Sequence[Result], layout: Place, wanted: int) -> float:
    """Seconds above which a candidate is of no use: its layout has a faster one, or enough other layouts have."""
    own = [result.seconds * _WORTH for result in best if place(result.candidate) == layout]
    last = best[-1].seconds if len(best) == wanted else float("inf")
    return min([last, *own])


def _turn(one: CandidateCosts) -> int:
    """0 for families with one order, 1 where a few are tried, 2 for those that search, 3 for offload: it takes longest."""
    if one.offload is not None:
        return 3
    braids = one.candidate.overlaps and not one.candidate.is_stock
    return 2 if one.family.plans_for_limits else int(braids or (one.family.searches and not one.candidate.is_stock))


def _rank(result: Result) -> tuple[float, float, Place]:
    """The fastest first; of those that are equally fast the one that needs least memory, then the simplest."""
    return float(f"{result.seconds:.6g}"), float(f"{result.fullest.total:.6g}"), place(result.candidate)


def _pool(processes: int) -> ProcessPoolExecutor:
    """Processes that plan without torch, which takes long to import."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=spawn, initializer=end_with_parent, initargs=(signal.SIGINT,))


def _give_up(pool: ProcessPoolExecutor) -> None:
    """End processes at once."""
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
