"""Activations in host memory: adds copies to the host and back to any schedule, so that no pass waits for a copy.

Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory Optimization". Passes keep their order and,
at the given costs, their times. Copies to the host run as early as they can, copies back as late as they can; in between the
device memory is free. An activation that would be back too late, behind those needed before it, stays on the device.

Every rank is planned separately. It orders its activations in two ways: so that the fewest copies lower the peak, and by
lifespan (from the end of F to the start of the backward), the longest first. In each order it offloads the first n, for n up
to what the mode allows, and takes the n with the lowest peak; with a memory limit, the smallest n that is within it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron.pipeline.planner.combinations.rows import SCHEDULES
from megatron.pipeline.planner.combinations.table import Facts
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import needed_on_own_rank
from megatron.pipeline.planner.schedule.core.passes import Kind, Offload, Pass
from megatron.pipeline.planner.schedule.core.problem import HostLimitTooLow
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.core.timeline import Timed
from megatron.pipeline.planner.schedule.rules.verify import rounded_up
from megatron.pipeline.planner.schedule.time.simulate import activation_changes, simulate

_TRIED = 48  # at most this many numbers of microbatches to offload are tried

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def offload(
    schedule: Schedule, costs: Costs, mode: Offload, limits: Sequence[float] | None = None, host_limit: float | None = None
) -> Schedule:
    """Copy activations to host memory and back while a rank's copy streams have time for it.

    Copies are planned at their slowest, as if all others ran at the same time, so that no pass waits for one.

    Args:
        schedule: without copies.
        costs: of its stages, with those of copies.
        mode: every activation for which it pays, or at most half of them.
        limits: for each rank, the memory that it should hold at most; no more is moved than that needs. A rank that cannot
            stay within its limit is planned above it: ``verify`` says so.
        host_limit: the most that a rank may have in host memory, in the costs' unit of memory.

    Raises:
        ValueError: the schedule has copies already or cuts microbatches into slices.
        HostLimitTooLow: no activation fits into the host limit.
    """
    if schedule.has_copies:
        raise ValueError(f"{schedule.name} has copies to host memory already: offload the schedule without them")
    Facts(offload=mode, splits=schedule.splits).refuse(SCHEDULES)
    ranks = [Rank(schedule, costs, rank, row) for rank, row in enumerate(simulate(schedule, costs).ranks)]
    sizes = [size for rank in ranks for size in rank.sizes.tolist()]
    if host_limit is not None and sizes and host_limit < min(sizes) * (1 - SLACK):
        raise HostLimitTooLow(
            f"a host memory limit of {host_limit:g} a rank has no room for one microbatch of a chunk, which takes "
            f"{rounded_up(min(sizes))} or more: raise it, or leave offloading out",
            min(sizes),
        )
    rows = tuple(
        row.with_copies(row.best(mode, None if limits is None else limits[rank], host_limit)) for rank, row in enumerate(ranks)
    )
    return replace(schedule, passes=rows)


def moved(schedule: Schedule, costs: Costs) -> list[float]:
    """The memory that every rank copies to the host in an iteration, in the costs' unit."""
    changes = activation_changes(schedule, costs)
    return [
        -sum(change for work, change in zip(passes, row, strict=True) if work.kind is Kind.D2H)
        for passes, row in zip(schedule.passes, changes, strict=True)
    ]


def host_peaks(schedule: Schedule, costs: Costs) -> list[float]:
    """The host memory that every rank occupies at most, from the start of a copy there to the end of the copy back."""
    peaks = []
    for row, passes, changes in zip(schedule.rows, schedule.passes, activation_changes(schedule, costs), strict=True):
        sizes = {work[1:3]: change for work, change in zip(passes, changes, strict=True) if work.kind is Kind.H2D}
        held = peak = 0.0
        for work in passes:
            if work in row.awaited:
                held -= sizes[row.awaited[work][1:3]]
            if work.kind is Kind.F:
                held += sizes.get(work[1:3], 0.0)
                peak = max(peak, held)
        peaks.append(peak)
    return peaks


@dataclass(frozen=True)
class _Selection:
    """The activations of a rank to offload, and the places of their copies in its row.

    Attributes:
        chosen: indices of a rank's candidates, in the order of their F.
        freed: for each of them, the slot before which its device memory is free.
        allocated: the slot before which its device memory is allocated again.
        gone, called: the times at which the copy to the host ends and the copy back starts. Copies at the same slot are in
            the order of these times, so that none waits for a later one.
    """

    chosen: Ints
    freed: Ints
    allocated: Ints
    gone: Floats
    called: Floats

    def copies(self) -> tuple[Ints, Ints, NDArray[np.bool_]]:
        """All copies in the order of the row: indices into ``chosen``, slots, and whether it is a copy back."""
        count = len(self.chosen)
        slots, times = np.concatenate((self.freed, self.allocated)), np.concatenate((self.gone, self.called))
        order = np.lexsort((np.arange(2 * count) >= count, times, slots))
        return order % max(1, count), slots[order], order >= count


class Rank:
    """One rank's row with its times, and its candidates: the activations that could be offloaded, in the order of their F.

    Attributes:
        starts, ends: times of every slot of the row.
        during: memory held during every slot if nothing is offloaded.
        works, sizes: for each candidate its F, and the memory that a copy moves.
        made, needed: for each candidate the slot of its F, and of the pass that needs what F keeps.
        to_host, to_device: for each candidate the seconds of its copies, at their slowest.
    """

    def __init__(self, schedule: Schedule, costs: Costs, rank: int, row: Sequence[Timed]) -> None:
        self._passes = schedule.passes[rank]
        self.starts, self.ends = (np.array([timed[at] for timed in row], dtype=np.float64) for at in (1, 2))
        # Starts and ends differ by rounding errors: they are sums of the same numbers in another order.
        self._slack = SLACK * self.ends[-1] if row else 0.0
        levels = np.cumsum(activation_changes(schedule, costs)[rank])
        self._before = np.concatenate(([0.0], levels))  # memory held before every slot
        self.during = np.maximum(levels, self._before[:-1])
        stages = schedule.placement.stages[rank]
        # Both halves of a braid start with the first, and nothing stands between them.
        self._second = np.array([*(bool(work.kind.row.braided) for work in self._passes), False], dtype=np.int64)
        uses: dict[tuple[int, ...], int] = {}  # by microbatch and chunk, the slot before which the rank needs what F keeps
        for slot, work in enumerate(self._passes):
            if Kind.H2D in needed_on_own_rank(work.kind):
                uses.setdefault(work[1:3], slot - int(self._second[slot]))
        again = {work[1:3] for work in self._passes if work.kind is Kind.R}
        self.works: list[Pass] = []
        made, needed, sizes, taken = [], [], [], []
        for slot, work in enumerate(self._passes):
            if work.kind is not Kind.F:
                continue
            its_costs, recomputed = costs.of(work.microbatch), work[1:3] in again
            size = float(its_costs.stages[stages[work.chunk]].moved(recomputed))
            after = uses.get(work[1:3])
            if after is None or not size:
                continue  # an evaluation has no backward
            self.works.append(work)
            made.append(slot)
            needed.append(after)
            sizes.append(size)
            taken.append([its_costs.seconds(kind, stages[work.chunk], recomputed) for kind in (Kind.D2H, Kind.H2D)])
        self.sizes: Floats = np.array(sizes, dtype=np.float64)
        self.made, self.needed = np.array(made, dtype=np.int64), np.array(needed, dtype=np.int64)
        seconds = np.array(taken, dtype=np.float64).reshape(-1, 2) / costs.copies.slowest
        self.to_host, self.to_device = seconds[:, 0], seconds[:, 1]

    def best(self, mode: Offload, limit: float | None, host_limit: float | None) -> _Selection:
        """The selection with the lowest peak; with a limit, the first tried (few copies come first) that is within it."""
        nothing = self._select(np.array([], dtype=np.int64))
        if not self.works:
            return nothing
        lifespans = self.starts[self.needed] - self.ends[self.made]
        most = self.sizes.sum() / 2 if mode is Offload.SELECTIVE else np.inf
        room = min(most, np.inf if host_limit is None else host_limit) * (1 + SLACK)
        pays = (lifespans >= (self.to_host + self.to_device) * (1 - SLACK)) & (self.sizes <= room)
        best, least = nothing, self._peak(nothing)
        longest = np.argsort(-lifespans, kind="stable")
        for order in (self._covering(pays), longest[pays[longest]]):
            chosen = self._with_room(order, host_limit)
            chosen = chosen[np.cumsum(self.sizes[chosen]) <= most * (1 + SLACK)]
            for number in _numbers(len(chosen)):
                if limit is not None and least <= limit * (1 + SLACK):
                    break
                selection = self._in_time(chosen[:number])
                peak = self._peak(selection)
                if peak < least * (1 - SLACK):
                    best, least = selection, peak
        return best

    def _covering(self, pays: NDArray[np.bool_]) -> Ints:
        """The candidates for which it pays, in an order in which few copies lower the peak.

        Greedy interval cover: at the first slot of peak memory, take the activation that can stay on the host longest. This
        gives the fewest copies if all activations have one size and the copy streams are idle.
        """
        freed = np.searchsorted(self.starts, self.ends[self.made] + self.to_host - self._slack)
        allocated = np.searchsorted(self.ends, self.starts[self.needed] - self.to_device + self._slack, side="right")
        held, remaining, order = self.during.copy(), pays & (freed < allocated), []
        while len(which := np.flatnonzero(remaining & (freed <= (top := held.argmax())) & (top < allocated))):
            longest = which[allocated[which].argmax()]
            held[freed[longest] : allocated[longest]] -= self.sizes[longest]
            remaining[longest] = False
            order.append(longest)
        return np.array(order, dtype=np.int64)

    def _with_room(self, order: Ints, host_limit: float | None) -> Ints:
        """The candidates that fit into host memory together with those before them, from F to the pass that needs it back."""
        if host_limit is None:
            return order
        held, kept = np.zeros(len(self._passes)), []
        for candidate in order.tolist():
            during = held[self.made[candidate] : self.needed[candidate]]
            if during.max() + self.sizes[candidate] <= host_limit * (1 + SLACK):
                during += self.sizes[candidate]
                kept.append(candidate)
        return np.array(kept, dtype=np.int64)

    def _in_time(self, order: Ints) -> _Selection:
        """A selection without the activations that would be back too late; ``order`` has the most valuable first."""
        while True:
            selection = self._select(np.sort(order))
            late = selection.chosen[(selection.allocated < selection.freed) | (selection.called < selection.gone - self._slack)]
            if not len(late):
                return selection
            # Dropping some makes the others earlier: so only the less valuable half of the late ones is dropped at once.
            ranked = order[np.isin(order, late)]
            order = order[~np.isin(order, ranked[len(ranked) // 2 :])]

    def _select(self, chosen: Ints) -> _Selection:
        """The places of the copies of some candidates: to the host as early as possible, back as late as possible."""
        ends = _one_after_another(self.ends[self.made[chosen]], self.to_host[chosen])
        back = chosen[np.argsort(self.needed[chosen], kind="stable")][::-1]
        latest = np.empty(len(self.works))
        latest[back] = -_one_after_another(-self.starts[self.needed[back]], self.to_device[back])
        freed = np.maximum(np.searchsorted(self.starts, ends - self._slack), self.made[chosen] + 1)
        allocated = np.minimum(np.searchsorted(self.ends, latest[chosen] + self._slack, side="right"), self.needed[chosen])
        freed, allocated = freed + self._second[freed], allocated - self._second[allocated]
        return _Selection(chosen, freed, allocated, ends, latest[chosen])

    def _peak(self, selection: _Selection) -> float:
        which, slots, is_back = selection.copies()
        changes = np.where(is_back, 1, -1) * self.sizes[selection.chosen][which]
        at_places = (self._before[slots] + np.cumsum(changes)).max(initial=0)
        away = np.zeros(len(self._passes) + 1)
        np.add.at(away, slots, changes)
        return float(max(at_places, (self.during + np.cumsum(away)[:-1]).max(initial=0)))

    def with_copies(self, selection: _Selection) -> tuple[Pass, ...]:
        """The row with the copies of a selection."""
        before: list[list[Pass]] = [[] for _ in range(len(self._passes) + 1)]
        for number, slot, is_back in zip(*(column.tolist() for column in selection.copies()), strict=True):
            before[slot].append(self.works[selection.chosen[number]]._replace(kind=Kind.H2D if is_back else Kind.D2H))
        return tuple(itertools.chain(*((*copies, work) for copies, work in zip(before, self._passes, strict=False))))


def _numbers(most: int) -> list[int]:
    """Numbers from 1 to ``most``: all, or ``_TRIED`` of them at equal distances."""
    return sorted({round(most * step / _TRIED) for step in range(1, _TRIED + 1)} - {0})


def _one_after_another(ready: Floats, seconds: Floats) -> Floats:
    """The ends of copies on one stream: each starts once it is ready and the one before it has ended."""
    done = np.cumsum(seconds)
    return done + np.maximum.accumulate(ready - (done - seconds)) if len(ready) else done
