"""When can the k-th pass of every kind on every stage start at the earliest? The facts that ``bound`` is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.pipeline.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.schedule.core.kinds import sources, stage_kinds
from megatron.pipeline.schedule.core.passes import Kind
from megatron.pipeline.schedule.core.problem import Problem

Times = NDArray[np.float64]

SLACK = 1e-9  # sums of floats stray in their last bits: a limit this much larger, relatively, keeps every bound valid


@dataclass(frozen=True)
class Line:
    """All passes of one kind on one stage. They run in the order of their microbatches, so that one can count them.

    Attributes:
        stage, rank: where they run.
        kind: F, R, B (also for BW) or W.
        seconds: of one pass; of every pass, where microbatches are unequal.
        change: the memory that a pass allocates when it starts (positive) or frees when it ends (negative), where its load is 1.
        count: how many passes there are.
        memory: the loads of all passes together, or of every pass where microbatches are unequal.
        before: the lines of which the k-th pass precedes the k-th of this one, as (index, seconds of the hop between).
    """

    stage: int
    rank: int
    kind: Kind
    seconds: float | Times
    change: float
    count: int
    memory: float | Times
    before: tuple[tuple[int, float | Times], ...] = ()

    @property
    def unequal(self) -> bool:
        return isinstance(self.seconds, np.ndarray)

    def between(self, low: Any, high: Any) -> Any:
        """Seconds of the passes from number ``low`` on that are before number ``high``."""
        if not self.unequal:
            return (high - low) * self.seconds
        return self._sums[np.minimum(high, self.count)] - self._sums[np.minimum(low, self.count)]

    @cached_property
    def _sums(self) -> Times:
        return np.cumsum(np.append(0.0, self.seconds))


def _at(each: float | Times, numbers: NDArray[np.int64]) -> float | Times:
    """Values of passes: the same of all, or of those with these numbers, and 0 where there is none."""
    return np.append(each, 0.0)[np.minimum(numbers, len(each))] if isinstance(each, np.ndarray) else each


def lines(problem: Problem) -> tuple[Line, ...]:
    """Every line of a problem, each after those that precede it.

    A backward may be split or fused, whichever a schedule likes, where the problem does not say that it is fused. Let b be
    the shorter of B and BW, and w what the shorter of B + W and BW takes beyond b. A B that takes b and a W that takes w
    stand for both: no pass becomes longer and nothing is held longer if B and W, or BW, are replaced by these. Nor does that B
    allocate, since BW does not.

    Slices of a microbatch count like microbatches.
    """
    return _lines(replace(problem, limits=None))


@lru_cache(maxsize=8)  # a search asks for the bounds of one problem within many limits
def _lines(problem: Problem) -> tuple[Line, ...]:
    placement, costs = problem.placement, problem.costs.sliced(problem.splits)
    total = problem.microbatches * problem.splits
    stages = range(placement.last_stage + 1)
    chains = [stage_kinds(stage in problem.recompute, stage in problem.fused) for stage in stages]
    known: dict[tuple[int, Kind], int] = {}
    made: list[Line] = []
    forwards = ((stage, kind) for stage in stages for kind in chains[stage] if kind.is_forward)
    backwards = ((stage, kind) for stage in reversed(stages) for kind in chains[stage] if not kind.is_forward)
    for stage, kind in chain(forwards, backwards):
        (rank, chunk), replica = placement.home(stage), placement.replica(stage)
        count = len(range(replica, total, placement.replicas))

        def each(value: Callable[[Costs], float], replica: int = replica) -> float | Times:
            if not costs.loads:
                return float(value(costs))
            return np.array(costs.each(value, total), float)[replica :: placement.replicas]

        def least_seconds(costs: Costs, stage: int = stage, kind: Kind = kind) -> float:
            return _least_seconds(_leanest(costs.stages[stage]), kind)

        before: list[tuple[int, float | Times]] = []
        for source in sources(placement, None)[kind, rank, chunk]:
            its_stage = placement.stage(*source.homes[0])
            needed = next(known[its_stage, other] for other in source.kinds if (its_stage, other) in known)
            before.append((needed, source.hops * each(lambda costs: costs.hop)))
        change = _leanest(costs.stages[stage]).allocated(kind, stage in problem.recompute)
        own = Kind(kind.row.replaces[0]) if kind.row.replaces else kind
        known[stage, own] = len(made)
        memory = np.array([load.memory for load in costs.loads[replica :: placement.replicas]]) if costs.loads else count
        made.append(Line(stage, rank, own, each(least_seconds), float(change), count, memory, tuple(before)))
    return tuple(made)


def _leanest(cost: StageCosts) -> StageCosts:
    return replace(cost, retained=cost.activation) if cost.grows else cost


def _least_seconds(cost: StageCosts, kind: Kind) -> float:
    """Seconds of a pass; of one that another kind can replace, its share of the shorter way (see ``lines``)."""
    for whole in (other for other in Kind if kind in other.row.replaces):
        at, together = whole.row.replaces.index(kind), cost.seconds(whole)
        parts = [cost.seconds(Kind(part)) for part in whole.row.replaces]
        return min(sum(parts[: at + 1]), together) - (min(sum(parts[:at]), together) if at else 0)
    return cost.seconds(kind)


def backwards_in_time(forward: Sequence[Line]) -> list[Line]:
    """The same lines, of schedules that run from the end to the start: what was freed is allocated."""

    def turned(each: float | Times) -> float | Times:
        return each[::-1] if isinstance(each, np.ndarray) else each

    after: list[list[tuple[int, float | Times]]] = [[] for _ in forward]
    for index, line in enumerate(forward):
        for other, hop in line.before:
            after[other].append((len(forward) - 1 - index, turned(hop)))
    return [
        replace(line, seconds=turned(line.seconds), change=-line.change, before=tuple(next_))
        for line, next_ in zip(forward[::-1], after[::-1], strict=True)
    ]


class _StartNeed(NamedTuple):
    """Facts about a rank when the k-th pass of a line starts there, for every k.

    Attributes:
        work: the seconds that the rank has computed before.
        memory: how much has been freed before; None where nothing has to be.
        frees: the lines that can have freed it, and how much a pass of each does.
    """

    work: Times
    memory: Times | None
    frees: tuple[tuple[int, float], ...]


class Earliest:
    """Lower bounds of the start of every pass, for each of several origins of time.

    The origin of time is the first pass of one rank, or, where it is None, the first pass of all. In the first case
    nothing is known of other ranks but what follows: a microbatch may have come arbitrarily far before, on other ranks.

    Four facts raise the starts, over and over (``sweep``):

    * The passes of a line follow each other, and those of the lines before, a hop later where the rank is another.
    * A pass that allocates starts only after enough has been freed: with the k-th pass of a line, k passes of all lines
      before it on this rank have allocated as well. What they hold beyond the limit has been freed, by passes whose
      earliest ends are known: the first moment when enough of those can have ended is an earliest start.
    * A rank computes one pass at a time. Let it have computed at most U seconds before some moment T (``most_work``). If a
      pass starts when w > U seconds have been computed, it starts at T + (w - U) or later. w counts the passes of the
      lines before it and, if memory has to be freed, the cheapest passes that free it.
    * T is the origin, where U = 0, or the earliest moment when a stage frees memory for the first time.

    These are facts about numbers of passes, so they hold for every schedule that runs lines in order. Where microbatches are
    unequal, memory tells nothing here: passes that free it are not counted by one size.

    Args:
        problem: what is planned.
        lines: of the problem, or of the same backwards in time.
        origins: ranks, or None.
        numbers: which passes of every line are looked at, from 0. The others start no earlier than the one before them.
    """

    def __init__(self, problem: Problem, lines: Sequence[Line], origins: Sequence[int | None], numbers: Sequence[int]) -> None:
        self.lines, self._origins, self._splits = lines, origins, problem.splits
        self.of_rank: list[list[int]] = [[] for _ in range(problem.ranks)]
        self._of_stage: dict[int, list[int]] = {}
        for index, line in enumerate(lines):
            self.of_rank[line.rank].append(index)
            self._of_stage.setdefault(line.stage, []).append(index)
        unequal = any(line.unequal for line in lines)
        self._limits = [math.inf if unequal else usable(problem, rank) for rank in range(problem.ranks)]
        self._zero = [np.array([0.0 if o in (None, rank) else -np.inf for o in origins]) for rank in range(problem.ranks)]
        self._numbers = np.array(numbers)
        self._counts = np.append(self._numbers, max(line.count for line in lines))
        self._absent = [self._numbers >= line.count for line in lines]
        self.starts: list[Times] = []
        for line, absent in zip(lines, self._absent, strict=True):
            start = np.repeat(self._zero[line.rank][:, None], len(numbers), axis=1)
            start[:, absent] = np.inf
            self.starts.append(start)
        # Slices of a microbatch run backward in reverse: the first of them needs the last one's F.
        self._turn = (self._numbers // self._splits + 1) * self._splits - 1
        self._turned = self._position(self._turn)
        ancestors: list[int] = []  # sets of lines as bits
        for line in lines:
            ancestors.append(0)
            for other, _ in line.before:
                ancestors[-1] |= ancestors[other] | 1 << other
        self._needs = [self._need(index, [x for x in self.of_rank[line.rank] if ancestors[index] >> x & 1])
                       for index, line in enumerate(lines)]  # fmt: skip

    def _need(self, index: int, ancestors: list[int]) -> _StartNeed:
        line, numbers = self.lines[index], self._numbers
        work: Times = line.between(0, numbers)
        for other in ancestors:
            turns = (self.lines[other].kind is Kind.F) != (line.kind is Kind.F)
            work = work + self.lines[other].between(0, (self._turn if turns else numbers) + 1)
        limit = self._limits[line.rank]
        if line.change <= 0 or limit == math.inf:
            return _StartNeed(work, None, ())
        done = {*ancestors, index}
        held, cheapest = 0.0, math.inf
        frees: list[tuple[int, float]] = []
        for stage in {self.lines[other].stage for other in done}:
            # One microbatch holds this on the stage once all that is done is done. From then on it may allocate before it
            # frees: it has freed at least what it holds less than ever before.
            least = sum(self.lines[other].change for other in self._of_stage[stage] if other in done)
            held += least
            level, seconds, freed = least, 0.0, 0.0
            for other in self._of_stage[stage]:
                if other not in done:
                    level += self.lines[other].change
                    seconds += self.lines[other].between(0, 1)
                    if level < least - SLACK * held:
                        frees.append((other, least - level))
                        freed += least - level
                        cheapest = min(cheapest, seconds / freed)
                        least = level
        memory = (numbers + 1) * held - limit
        memory[memory <= SLACK * max(limit, held)] = 0
        if not frees or not memory.any():
            return _StartNeed(work, None, ())
        return _StartNeed(work + memory * cheapest, memory, tuple(frees))

    def sweep(self) -> None:
        """Raise the starts, each line once, after the lines before it."""
        moments = [self._moments(rank) for rank in range(len(self.of_rank))]
        for index, (line, need, absent) in enumerate(zip(self.lines, self._needs, self._absent, strict=True)):
            start = self.starts[index]
            for other, hop in line.before:
                ready = self.starts[other] + (_at(self.lines[other].seconds, self._numbers) + _at(hop, self._numbers))
                if self._splits > 1 and (self.lines[other].kind is Kind.F) != (line.kind is Kind.F):
                    ready = ready[:, self._turned]
                np.maximum(start, ready, out=start)
            if need.memory is not None:
                np.maximum(start, self._freed(need.memory, need.frees), out=start)
            moment, most = moments[line.rank]
            ahead = need.work - most
            np.maximum(start, np.where(ahead > SLACK * need.work, ahead + moment, -np.inf).max(axis=0), out=start)
            if np.any(line.seconds):
                own = line.between(0, self._numbers)
                start -= own
                np.maximum.accumulate(start, axis=1, out=start)
                start += own
            else:
                np.maximum.accumulate(start, axis=1, out=start)
            start[:, absent] = np.inf

    def _moments(self, rank: int) -> tuple[Times, Times]:
        """Moments, and the most seconds of work that the rank has done before them: by moment and origin."""
        found = [self._zero[rank]]
        for stage in {self.lines[index].stage: None for index in self.of_rank[rank]}:
            first = next((index for index in self._of_stage[stage] if self.lines[index].change < 0), self._of_stage[stage][-1])
            found.append(self.starts[first][:, 0])
        moments = np.array(found)[:, :, None]
        counts = {index: self._counted(index, (self.starts[index] < moments).sum(axis=2)) for index in self.of_rank[rank]}
        most = self._most_work(rank, counts)[:, :, None]
        return np.where(np.isfinite(moments), moments, -np.inf), most

    def _position(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Position of the last pass up to each number among those that are looked at."""
        return np.searchsorted(self._numbers, numbers, side="right") - 1

    def _counted(self, index: int, started: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of passes that may have started, from how many of those that are looked at have."""
        return np.minimum(self._counts[started], self.lines[index].count)

    def _freed(self, memory: Times, frees: Sequence[tuple[int, float]]) -> Times:
        """The earliest moments when that much can have been freed."""
        ends = np.concatenate([self.starts[other] + self.lines[other].seconds for other, _ in frees], axis=1)
        wanted = memory * (1 - SLACK)
        if len(frees) == 1:
            moments = ends[:, self._position(np.ceil(wanted / frees[0][1]).astype(int) - 1)]
        else:
            sizes = np.concatenate([np.diff(self._counts) * size for _, size in frees])
            order = np.argsort(ends, axis=1, kind="stable")
            freed = np.cumsum(sizes[order], axis=1)
            row = np.arange(len(ends))[:, None] * (2 * freed[0, -1])  # one search over all rows, each above the one before
            at = np.searchsorted((freed + row).ravel(), (wanted + row).ravel()).reshape(len(ends), -1)
            at = np.minimum(at - np.arange(len(ends))[:, None] * ends.shape[1], ends.shape[1] - 1)
            moments = np.take_along_axis(ends, np.take_along_axis(order, at, axis=1), axis=1)
        moments[:, memory == 0] = -np.inf
        return moments

    def _most_work(self, rank: int, counts: dict[int, NDArray[np.int64]]) -> Times:
        """The most seconds of work in passes that have started, if no more than ``counts`` of every line have.

        Passes that free memory make room. What allocates has to fit: the best use of the room, parts of a pass allowed.
        """
        seconds: Times = np.zeros(next(iter(counts.values())).shape)
        room = seconds + self._limits[rank]
        loads: list[tuple[float, float, NDArray[np.int64]]] = []
        for stage in {self.lines[index].stage: None for index in self.of_rank[rank]}:
            stack: list[int] = []
            freeing = False
            for index in self._of_stage[stage]:
                line = self.lines[index]
                freeing = freeing or line.change < 0 or line.unequal
                if freeing:
                    seconds = seconds + line.between(0, counts[index])
                    room = room - counts[index] * line.change
                else:
                    stack.append(index)
            loads += self._loads(stack, counts)
        for size, work, number in sorted(loads, key=lambda load: load[1] / load[0] if load[0] else math.inf, reverse=True):
            taken = np.minimum(number, np.maximum(room, 0) / size) if size else number
            room = room - taken * size
            seconds = seconds + taken * work
        return seconds

    def _loads(self, stack: list[int], counts: dict[int, NDArray[np.int64]]) -> Iterable[tuple[float, float, NDArray[np.int64]]]:
        """Items with which a stage can fill memory, as (size, seconds, how many): passes of one microbatch in their order, those
        taken together of which the later ones do more work for their size."""
        for depth, deepest in enumerate(stack):
            number = counts[deepest] - (counts[stack[depth + 1]] if depth + 1 < len(stack) else 0)
            merged: list[tuple[float, float]] = []
            for index in stack[: depth + 1]:
                size, work = self.lines[index].change, self.lines[index].between(0, 1)
                while merged and work * merged[-1][0] >= merged[-1][1] * size:
                    size, work = size + merged[-1][0], work + merged.pop()[1]
                merged.append((size, work))
            yield from ((size, work, np.maximum(number, 0)) for size, work in merged)

    def windows(self, origin: int, rank: int) -> tuple[Times, Times]:
        """Moments in order, counted from the origin, and the most seconds of work that the rank has done before each."""
        starts = [self.starts[index][origin] for index in self.of_rank[rank]]
        moments = np.unique(np.concatenate(starts))
        moments = moments[np.isfinite(moments)]
        counts = {
            index: self._counted(index, np.searchsorted(start, moments))
            for index, start in zip(self.of_rank[rank], starts, strict=True)
        }
        return moments, self._most_work(rank, counts)

    def last_end(self, origin: int, rank: int) -> float:
        """The earliest end of a rank's last pass."""
        ends = [0.0]
        for index in self.of_rank[rank]:
            line = self.lines[index]
            if line.count:
                at = int(self._position(np.array(line.count - 1)))
                ends.append(float(self.starts[index][origin, at]) + float(line.between(int(self._numbers[at]), line.count)))
        return max(ends)


def usable(problem: Problem, rank: int) -> float:
    """Share of a rank's limit that can be filled: whole units, where all that is held comes in multiples of one size."""
    if problem.limits is None:
        return math.inf
    limit, size = float(problem.limits[rank]), unit(problem, rank)
    return limit if limit == math.inf or not size else math.floor(limit / size * (1 + SLACK)) * size


def unit(problem: Problem, rank: int) -> float:
    """The size of which all that a rank holds is a multiple; 0 if there is none such, or nothing is held."""
    if problem.costs.loads:
        return 0.0
    sizes = []
    for stage in problem.placement.stages[rank]:
        cost = _leanest(problem.costs.stages[stage])
        kept = [cost.checkpoint] if stage in problem.recompute else []
        sizes += [float(size) / problem.splits for size in (cost.activation, cost.retained, *kept) if size > 0]
    least = min(sizes, default=0.0)
    return least if all(abs(size / least - round(size / least)) <= SLACK for size in sizes) else 0.0
