"""Activations in host memory: any schedule in, the same with copies to the host and back that keep no pass waiting.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization". Passes keep their order, and
so, with the costs at hand, their times. Copies to the host run as early as they can, copies back as late as they can; what is
gone from the device in between is what offloading saves. What could not be back in time, behind those needed first, does
not pay and stays.

Every rank is planned by itself. It ranks what could go in two ways: what takes the fewest copies to lower the peak, and the
longest lifespans, from the end of F to the start of the backward, first. Of either it tries the first few, as many as the mode
allows, and takes the number of them with which it holds least; within a memory limit, the smallest number that is enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import Kind, Offload, Pass
from megatron.pipeline.schedule.core.problem import HostLimitTooLow
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.core.timeline import Timed
from megatron.pipeline.schedule.rules.verify import rounded_up
from megatron.pipeline.schedule.time.simulate import activation_changes, simulate

_TRIED = 48  # numbers of microbatches to offload, between none and all
_SLACK = 1e-9

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def offload(
    schedule: Schedule,
    costs: Costs,
    mode: Offload,
    limits: Sequence[float] | None = None,
    host_limit: float | None = None,
) -> Schedule:
    """Copy activations to host memory and back where a rank's copy lanes have the time.

    Copies are planned to take what they do with everything else on the way, so that no pass waits for one.

    Args:
        schedule: without copies.
        costs: of its stages, with those of copies.
        mode: all that pays, or no more than half of the activations.
        limits: for each rank, what it should hold at most; no more is moved than that asks for. A rank that cannot hold so
            little holds what it must: ``verify`` says so.
        host_limit: the most that a rank may have in host memory, in the costs' unit of memory.

    Raises:
        ValueError: the schedule has copies already or cuts microbatches into slices.
        HostLimitTooLow: nothing at all fits into the host limit.
    """
    if schedule.has_copies:
        raise ValueError(f"{schedule.name} has copies to host memory already: offload the schedule without them")
    if schedule.splits > 1:
        raise ValueError(
            f"{schedule.name} cuts microbatches into {schedule.splits} slices, which share the memory of a microbatch: take a "
            "schedule without slices to offload it"
        )
    ranks = [Rank(schedule, costs, rank, row) for rank, row in enumerate(simulate(schedule, costs).ranks)]
    sizes = [size for rank in ranks for size in rank.sizes.tolist()]
    if host_limit is not None and sizes and host_limit < min(sizes) * (1 - _SLACK):
        raise HostLimitTooLow(
            f"a host memory limit of {host_limit:g} a rank has no room for one microbatch of a chunk, which takes "
            f"{rounded_up(min(sizes))} or more: raise it, or leave offloading out",
            min(sizes),
        )
    rows = tuple(
        one.with_copies(one.best(mode, None if limits is None else limits[rank], host_limit)) for rank, one in enumerate(ranks)
    )
    return replace(schedule, passes=rows)


def moved(schedule: Schedule, costs: Costs) -> list[float]:
    """How much every rank copies to host memory in an iteration, in the costs' unit of memory."""
    changes = activation_changes(schedule, costs)
    return [
        -sum(change for work, change in zip(passes, row, strict=True) if work.kind is Kind.D2H)
        for passes, row in zip(schedule.passes, changes, strict=True)
    ]


def host_peaks(schedule: Schedule, costs: Costs) -> list[float]:
    """The most that every rank has in host memory at once, from the start of a copy there to the end of the one back."""
    peaks = []
    for row, passes, changes in zip(schedule.rows, schedule.passes, activation_changes(schedule, costs), strict=True):
        sizes = {work[1:3]: change for work, change in zip(passes, changes, strict=True) if work.kind is Kind.H2D}
        held = peak = 0.0
        for work in passes:
            if work in row.awaited:
                held -= sizes[work[1:3]]
            if work.kind is Kind.F:
                held += sizes.get(work[1:3], 0.0)
                peak = max(peak, held)
        peaks.append(peak)
    return peaks


@dataclass(frozen=True)
class _Plan:
    """Which microbatches of a rank to offload, and where.

    Attributes:
        chosen: indices of a rank's candidates, in the order of their F.
        freed: for each of them, the slot before which its device memory is free.
        allocated: the slot before which it is allocated again.
        gone, called: the times at which the copy to the host ends and the one back starts. Where several stand at one place of
            the row they do so in the order of these, so that none waits for a later one.
    """

    chosen: Ints
    freed: Ints
    allocated: Ints
    gone: Floats
    called: Floats

    def copies(self) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """All copies in the order of the row: indices of the chosen, slots, and whether they are back."""
        count = len(self.chosen)
        slots, times = np.concatenate((self.freed, self.allocated)), np.concatenate((self.gone, self.called))
        order = np.lexsort((np.arange(2 * count) >= count, times, slots))
        return order % max(1, count), slots[order], order >= count


class Rank:
    """One rank's row, with the times at which its passes run, and what could be offloaded: its candidates, by their F.

    Attributes:
        starts, ends: of every slot of the row.
        during: what is held during every slot while nothing is away.
        works, sizes: F of every candidate, and how much a copy moves.
        made, needed: for each of them, the slot of its F, and of the pass that needs what F keeps.
        to_host, to_device: seconds that its copies take with everything else on the way.
    """

    def __init__(self, schedule: Schedule, costs: Costs, rank: int, row: Sequence[Timed]) -> None:
        self._passes = schedule.passes[rank]
        self.starts, self.ends = (np.array([timed[at] for timed in row], dtype=np.float64) for at in (1, 2))
        # Starts and ends are sums of the same numbers in another order.
        self._slack = _SLACK * self.ends[-1] if row else 0.0
        levels = np.cumsum(activation_changes(schedule, costs)[rank])
        self._before = np.concatenate(([0.0], levels))  # every slot
        self.during = np.maximum(levels, self._before[:-1])
        stages = schedule.placement.stages[rank]
        slots = {work: slot for slot, work in enumerate(self._passes)}
        again = {work[1:3] for work in self._passes if work.kind is Kind.R}
        self.works: list[Pass] = []
        made, needed, sizes, taken = [], [], [], []
        for slot, work in enumerate(self._passes):
            if work.kind is not Kind.F:
                continue
            stage, recomputed = costs.stages[stages[work.chunk]], work[1:3] in again
            size = float(stage.moved(recomputed))
            kinds = (Kind.R,) if recomputed else (Kind.B, Kind.BW)
            after = next((slots[other] for kind in kinds if (other := work._replace(kind=kind)) in slots), None)
            if after is None or not size:
                continue  # an evaluation has no backward
            self.works.append(work)
            made.append(slot)
            needed.append(after)
            sizes.append(size)
            taken.append([costs.seconds(kind, stages[work.chunk], recomputed) for kind in (Kind.D2H, Kind.H2D)])
        self.sizes: Floats = np.array(sizes, dtype=np.float64)
        self.made, self.needed = np.array(made, dtype=np.int64), np.array(needed, dtype=np.int64)
        seconds = np.array(taken, dtype=np.float64).reshape(-1, 2) / costs.copies.slowest
        self.to_host, self.to_device = seconds[:, 0], seconds[:, 1]

    def best(self, mode: Offload, limit: float | None, host_limit: float | None) -> _Plan:
        """The plan with which this rank holds least; where some are within the limit, the first of those that moves few."""
        nothing = self._plan(np.array([], dtype=np.int64))
        if not self.works:
            return nothing
        lifespans = self.starts[self.needed] - self.ends[self.made]
        most = self.sizes.sum() / 2 if mode is Offload.SELECTIVE else np.inf
        room = min(most, np.inf if host_limit is None else host_limit) * (1 + _SLACK)
        pays = (lifespans >= (self.to_host + self.to_device) * (1 - _SLACK)) & (self.sizes <= room)
        best, least = nothing, self._peak(nothing)
        longest = np.argsort(-lifespans, kind="stable")
        for order in (self._covering(pays), longest[pays[longest]]):
            chosen = self._with_room(order, host_limit)
            chosen = chosen[np.cumsum(self.sizes[chosen]) <= most * (1 + _SLACK)]
            for number in _numbers(len(chosen)):
                if limit is not None and least <= limit * (1 + _SLACK):
                    break
                plan = self._in_time(chosen[:number])
                peak = self._peak(plan)
                if peak < least * (1 - _SLACK):
                    best, least = plan, peak
        return best

    def _covering(self, pays: NDArray[np.bool_]) -> Ints:
        """What pays, one after another, so that few of them lower the peak.

        Each time, of those that could be away in the first slot in which most is held, the one that could be so longest from then
        on: the fewest there are to cover all such slots, if all are of one size and no lane is busy.
        """
        freed = np.searchsorted(self.starts, self.ends[self.made] + self.to_host - self._slack)
        allocated = np.searchsorted(self.ends, self.starts[self.needed] - self.to_device + self._slack, side="right")
        held, left, order = self.during.copy(), pays & (freed < allocated), []
        while len(which := np.flatnonzero(left & (freed <= (top := held.argmax())) & (top < allocated))):
            one = which[allocated[which].argmax()]
            held[freed[one] : allocated[one]] -= self.sizes[one]
            left[one] = False
            order.append(one)
        return np.array(order, dtype=np.int64)

    def _with_room(self, order: Ints, host_limit: float | None) -> Ints:
        """What fits into host memory beside all that comes before it: from its F to the pass that needs it back."""
        if host_limit is None:
            return order
        held, kept = np.zeros(len(self._passes)), []
        for one in order.tolist():
            there = held[self.made[one] : self.needed[one]]
            if there.max() + self.sizes[one] <= host_limit * (1 + _SLACK):
                there += self.sizes[one]
                kept.append(one)
        return np.array(kept, dtype=np.int64)

    def _in_time(self, order: Ints) -> _Plan:
        """What is left of a choice, in the order of its worth, without those that would be late back."""
        while True:
            plan = self._plan(np.sort(order))
            late = plan.chosen[(plan.allocated < plan.freed) | (plan.called < plan.gone - self._slack)]
            if not len(late):
                return plan
            # Without these the others are earlier: only the later half of them, by their worth, is given up at once.
            ranked = order[np.isin(order, late)]
            order = order[~np.isin(order, ranked[len(ranked) // 2 :])]

    def _plan(self, chosen: Ints) -> _Plan:
        """Where the copies of what is chosen stand: to the host as early as can be, back as late as can be."""
        ends = _one_after_another(self.ends[self.made[chosen]], self.to_host[chosen])
        back = chosen[np.argsort(self.needed[chosen], kind="stable")][::-1]
        latest = np.empty(len(self.works))
        latest[back] = -_one_after_another(-self.starts[self.needed[back]], self.to_device[back])
        freed = np.maximum(np.searchsorted(self.starts, ends - self._slack), self.made[chosen] + 1)
        allocated = np.minimum(np.searchsorted(self.ends, latest[chosen] + self._slack, side="right"), self.needed[chosen])
        return _Plan(chosen, freed, allocated, ends, latest[chosen])

    def _peak(self, plan: _Plan) -> float:
        which, slots, is_back = plan.copies()
        changes = np.where(is_back, 1, -1) * self.sizes[plan.chosen][which]
        at_places = (self._before[slots] + np.cumsum(changes)).max(initial=0)
        away = np.zeros(len(self._passes) + 1)
        np.add.at(away, slots, changes)
        return float(max(at_places, (self.during + np.cumsum(away)[:-1]).max(initial=0)))

    def with_copies(self, plan: _Plan) -> tuple[Pass, ...]:
        """The row with the copies of a plan."""
        before: list[list[Pass]] = [[] for _ in range(len(self._passes) + 1)]
        for number, slot, is_back in zip(*(column.tolist() for column in plan.copies()), strict=True):
            before[slot].append(self.works[plan.chosen[number]]._replace(kind=Kind.H2D if is_back else Kind.D2H))
        return tuple(itertools.chain(*((*copies, work) for copies, work in zip(before, self._passes, strict=False))))


def _numbers(most: int) -> list[int]:
    """Numbers up to the most, all where they are few."""
    return sorted({round(most * step / _TRIED) for step in range(1, _TRIED + 1)} - {0})


def _one_after_another(ready: Floats, seconds: Floats) -> Floats:
    """When each ends of what starts once it is ready and the one before it has ended."""
    done = np.cumsum(seconds)
    return done + np.maximum.accumulate(ready - (done - seconds)) if len(ready) else done
