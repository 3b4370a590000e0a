"""The best trainings on a cluster: over layouts, schedules and what saves memory, each planned and simulated.

Candidates are tried in the order of what they could take at best, by several processes, until no other can be among the best.
What more memory would make faster is tried again with what saves some.
"""

from __future__ import annotations

import heapq
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count

from megatron.pipeline.processes import end_with_parent
from megatron.pipeline.schedule import families
from megatron.pipeline.tune.iteration import Beaten, Candidate, Misfit, Result, evaluate, least_seconds
from megatron.pipeline.tune.layouts import Layouts

BEST = 10

_GRACE = 8.0  # seconds for what was begun in time
_WORTH = 0.995  # costs are not known better: what could gain less than this over the best of its layout is not planned

Place = tuple[int, ...]


@dataclass
class Found:
    """What a search has found.

    Attributes:
        results: all that fit, the fastest first.
        misfits: what does not fit.
        tried, beaten, left_out: how many were planned, of how many it was clear that they are slower, and for how many there
            was no time.
        refused: why flags do not go together, by how often.
    """

    results: list[Result] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    tried: int = 0
    beaten: int = 0
    left_out: int = 0
    refused: list[tuple[str, int]] = field(default_factory=list)

    def best(self, wanted: int = BEST) -> list[Result]:
        """The fastest of every layout, the fastest first; of layouts that are the same in time and memory, the simplest."""
        fastest: dict[Place, Result] = {}
        for result in self.results:
            fastest.setdefault(place(result.candidate), result)
        different: dict[tuple[str, str], Result] = {}
        for result in fastest.values():
            different.setdefault((f"{result.seconds:.6g}", f"{result.fullest.total:.6g}"), result)
        return list(different.values())[:wanted]

    def front(self) -> list[Result]:
        """Those that no other beats in both time and memory, the fastest first."""
        front: list[Result] = []
        for result in self.results:
            if not front or result.fullest.total < front[-1].fullest.total:
                front.append(result)
        return front


def place(candidate: Candidate) -> Place:
    """The layout of a candidate."""
    args = candidate.args
    return (
        args.context_parallel_size,
        args.tensor_model_parallel_size,
        args.expert_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.data_parallel_size,
        args.micro_batch_size,
    )


def search(
    layouts: Layouts,
    stock: bool = False,
    wanted: int = BEST,
    processes: int | None = None,
    seconds: float = float("inf"),
    progress: Callable[[int, int], None] = lambda done, known: None,
) -> Found:
    """Find the fastest trainings.

    Args:
        stock: of those that megatron-core's own schedules can run, instead of ours.
        wanted: how many layouts are to be ranked; whatever is slower is not planned.
        processes: that plan; by default as many as there are cores.
        seconds: after which nothing more is begun; what is not planned some seconds later is left out.
        progress: told again and again how many candidates are done with, and how many are known.

    Raises:
        BrokenProcessPool: a process has died.
    """
    cluster, found = layouts.cluster, Found()
    numbers = count()
    open_: list[tuple[int, float, int, Candidate]] = []
    processes = processes or os.cpu_count() or 1

    ranked = False  # whether there is something of enough layouts to hold all else against

    def add(candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            heapq.heappush(open_, (_turn(candidate, ranked), least_seconds(cluster, candidate), next(numbers), candidate))

    for layout in layouts:
        add(layouts.candidates(layout, stock))
    known, interlocking, end = len(open_), stock, time.monotonic() + seconds
    with _pool(processes) as pool:
        running: dict[Future[Result | Misfit | Beaten], Candidate] = {}
        while open_ or running or not interlocking:
            if open_ and time.monotonic() > end:
                found.left_out += len(open_)
                open_.clear()
            if not (open_ or running or interlocking):  # ranked; would the best be faster if their iterations interlocked?
                interlocking = True
                add(other for result in found.best(wanted) for other in layouts.interlocked(result.candidate))
                known += len(open_)
                continue
            while open_ and len(running) < 2 * processes:
                _, least, _, candidate = heapq.heappop(open_)
                threshold = _threshold(found, candidate, wanted)
                if least > threshold:
                    found.beaten += 1
                else:
                    running[pool.submit(evaluate, cluster, candidate, threshold)] = candidate
            left = None if math.isinf(end) else max(0.0, end + _GRACE - time.monotonic())
            done = wait(running, left, FIRST_COMPLETED).done
            if running and not done:
                found.left_out += len(running)
                _give_up(pool)
                break
            for future in done:
                del running[future]
                before = len(open_)
                add(_taken(found, future.result(), layouts))
                known += len(open_) - before
            if not ranked and len(found.best(wanted)) == wanted:
                ranked = True
                open_ = [(_turn(candidate, ranked), least, number, candidate) for _, least, number, candidate in open_]
                heapq.heapify(open_)
            progress(found.tried + found.beaten, known)
    found.results.sort(key=_rank)
    found.refused = layouts.refused.most_common()
    return found


def _taken(found: Found, outcome: Result | Misfit | Beaten, layouts: Layouts) -> Iterator[Candidate]:
    """Note what became of a candidate; what should be tried because of it."""
    if isinstance(outcome, Beaten):
        found.beaten += 1
        return
    found.tried += 1
    if isinstance(outcome, Misfit):
        found.misfits.append(outcome)
    else:
        found.results.append(outcome)
        found.results.sort(key=_rank)
    if not outcome.hopeless if isinstance(outcome, Misfit) else outcome.starved:
        yield from layouts.remedies(outcome.candidate)


def _threshold(found: Found, candidate: Candidate, wanted: int) -> float:
    """Seconds above which a candidate is of no use: its layout has a faster one, or enough other layouts have."""
    best = found.best(wanted)
    own = [result.seconds * _WORTH for result in best if place(result.candidate) == place(candidate)]
    last = best[-1].seconds if len(best) == wanted else float("inf")
    return min([last, *own])


def _turn(candidate: Candidate, ranked: bool) -> int:
    """What has its turn sooner. First what is planned quickly, so that there is something to hold the rest against; then whatever
    could be fastest, but offload, which takes longest to plan, last."""
    if candidate.offload is not None:
        return 2
    return int(not ranked and families.named(candidate.variant.name).plans_for_limits)


def _rank(result: Result) -> tuple[float, float, Place]:
    """The fastest first; of those that are equally fast the one that needs least memory, then the simplest."""
    return float(f"{result.seconds:.6g}"), float(f"{result.fullest.total:.6g}"), place(result.candidate)


def _pool(processes: int) -> ProcessPoolExecutor:
    """Processes that plan without torch, which takes long to import."""
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent)


def _give_up(pool: ProcessPoolExecutor) -> None:
    """End processes in the middle of what they do."""
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
