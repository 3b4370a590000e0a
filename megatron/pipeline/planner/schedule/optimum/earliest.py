"""When can the k-th pass of every kind on every stage start at the earliest? The facts that ``bound`` is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.optimum.lines import Line, Times, leanest, of_passes


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

    * The passes of a line follow each other, and those of the lines before, a hop later where the rank is another, and their
      messages each other where these stand in line.
    * A pass that allocates starts only after enough has been freed: with the k-th pass of a line, k passes of all lines
      before it on this rank have allocated as well. What they hold beyond the limit has been freed, by passes whose
      earliest ends are known: the first moment when enough of those can have ended is an earliest start.
    * A rank computes one pass at a time. Let it have computed at most U seconds before some moment T (``most_work``). If a
      pass starts when w > U seconds have been computed, it starts at T + (w - U) or later. w counts the passes of the
      lines before it and, if memory has to be freed, the cheapest passes that free it.
    * T is the origin, where U = 0, or the earliest moment when a stage frees memory for the first time.

    These are facts about numbers of passes, and of their loads, so they hold for every schedule that runs lines in order.

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
        self._limits = [usable(problem, rank) for rank in range(problem.ranks)]
        self._zero = [np.array([0.0 if o in (None, rank) else -np.inf for o in origins]) for rank in range(problem.ranks)]
        self._numbers = np.array(numbers)
        self._counts = np.append(self._numbers, lines[0].count)  # that may have started, by how many of these have
        self.starts: list[Times] = [np.repeat(self._zero[line.rank][:, None], len(numbers), axis=1) for line in lines]
        # Slices of a microbatch run backward in reverse: the first of them needs the last one's F.
        self._turn = (self._numbers // self._splits + 1) * self._splits - 1
        self._turned = self._position(self._turn)
        ancestors: list[int] = []  # sets of lines as bits
        for line in lines:
            ancestors.append(0)
            for other, *_ in line.before:
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
        held, cheapest = np.zeros(len(numbers)), math.inf
        frees: list[tuple[int, float]] = []
        for stage in {self.lines[other].stage for other in done}:
            first = self.lines[self._of_stage[stage][0]]
            # One microbatch holds this on the stage once all that is done is done. From then on it may allocate before it
            # frees: it has freed at least what it holds less than ever before.
            least = sum(self.lines[other].change for other in self._of_stage[stage] if other in done)
            held = held + first.held(numbers + 1) * least
            level, freed, seconds = least, 0.0, np.zeros(1)
            for other in self._of_stage[stage]:
                if other not in done:
                    level += self.lines[other].change
                    seconds = seconds + self.lines[other].seconds
                    if level < least - SLACK * abs(first.change):
                        frees.append((other, least - level))
                        freed += least - level
                        each = first.memory if first.unequal else 1.0
                        cheapest = min(cheapest, float(np.min(seconds / (freed * each), initial=math.inf)))
                        least = level
        memory = held - limit
        memory[memory <= SLACK * np.maximum(limit, held)] = 0
        if not frees or not memory.any():
            return _StartNeed(work, None, ())
        return _StartNeed(work + memory * cheapest, memory, tuple(frees))

    def sweep(self) -> None:
        """Raise the starts, each line once, after the lines before it."""
        moments = [self._moments(rank) for rank in range(len(self.of_rank))]
        for index, (line, need) in enumerate(zip(self.lines, self._needs, strict=True)):
            start = self.starts[index]
            for other, hop, _, busy in line.before:
                ready = self.starts[other] + (of_passes(self.lines[other].seconds, self._numbers) + of_passes(hop, self._numbers))
                if self._splits > 1 and (self.lines[other].kind is Kind.F) != (line.kind is Kind.F):
                    ready = ready[:, self._turned]
                if not isinstance(busy, np.ndarray) and busy:
                    ready = np.maximum.accumulate(ready - busy * self._numbers, axis=1) + busy * self._numbers
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

    def _moments(self, rank: int) -> tuple[Times, Times]:
        """Moments, and the most seconds of work that the rank has done before them: by moment and origin."""
        found = [self._zero[rank]]
        for stage in {self.lines[index].stage: None for index in self.of_rank[rank]}:
            first = next((index for index in self._of_stage[stage] if self.lines[index].change < 0), self._of_stage[stage][-1])
            found.append(self.starts[first][:, 0])
        moments = np.array(found)[:, :, None]
        counts = {index: self._counts[(self.starts[index] < moments).sum(axis=2)] for index in self.of_rank[rank]}
        most = self._most_work(rank, counts)[:, :, None]
        return np.where(np.isfinite(moments), moments, -np.inf), most

    def _position(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Position of the last pass up to each number among those that are looked at."""
        return np.searchsorted(self._numbers, numbers, side="right") - 1

    def _freed(self, memory: Times, frees: Sequence[tuple[int, float]]) -> Times:
        """The earliest moments when that much can have been freed."""
        lines = [self.lines[other] for other, _ in frees]
        starts = [self.starts[other] for other, _ in frees]
        ends = np.concatenate(
            [own + of_passes(line.seconds, self._numbers) for own, line in zip(starts, lines, strict=True)], axis=1
        )
        wanted = memory * (1 - SLACK)
        if len(frees) == 1 and not lines[0].unequal:
            moments = ends[:, self._position(np.ceil(wanted / frees[0][1]).astype(int) - 1)]
        else:
            sizes = np.concatenate([np.diff(self.lines[other].held(self._counts)) * size for other, size in frees])
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

        Passes that free memory make room. What allocates has to fit: the best use of the room, parts of a pass allowed. Of
        unequal microbatches that is what F allocates.
        """
        seconds: Times = np.zeros(next(iter(counts.values())).shape)
        room = seconds + self._limits[rank]
        loads: list[tuple[float, float, NDArray[np.int64]]] = []
        unequal: list[int] = []
        for stage in {self.lines[index].stage: None for index in self.of_rank[rank]}:
            stack: list[int] = []
            freeing = False
            for index in self._of_stage[stage]:
                line = self.lines[index]
                freeing = freeing or line.change < 0
                if not freeing and not line.unequal:
                    stack.append(index)
                elif not freeing and line.change and index == self._of_stage[stage][0]:
                    unequal.append(index)
                else:
                    seconds = seconds + line.between(0, counts[index])
                    room = room - line.held(counts[index]) * min(line.change, 0.0 if line.unequal else line.change)
            loads += self._loads(stack, counts)
        for size, work, number in sorted(loads, key=lambda load: load[1] / load[0] if load[0] else math.inf, reverse=True):
            taken = np.minimum(number, np.maximum(room, 0) / size) if size else number
            room = room - taken * size
            seconds = seconds + taken * work
        return seconds + self._most_of_unequal(unequal, counts, room * (1 + SLACK)) if unequal else seconds

    def _most_of_unequal(self, lines: Sequence[int], counts: dict[int, NDArray[np.int64]], room: Times) -> Times:
        """The most seconds of passes that fit into some room: the first ones of one line, or parts of any of several."""
        if len(lines) == 1:
            line = self.lines[lines[0]]
            fit = np.searchsorted(line.held(np.arange(line.count + 1)) * line.change, room, side="right") - 1
            most: Times = line.between(0, np.clip(fit, 0, counts[lines[0]]))
            return most
        own = [self.lines[index] for index in lines]
        sizes, work = (
            np.concatenate(each) for each in zip(*((one.memory * one.change, one.seconds) for one in own), strict=True)
        )
        order = np.argsort(-work / sizes, kind="stable")
        there = np.concatenate(
            [np.arange(one.count) < counts[index][..., None] for one, index in zip(own, lines, strict=True)], -1
        )
        taken = np.where(there[..., order], sizes[order], 0.0)
        share = np.clip((room[..., None] - taken.cumsum(axis=-1) + taken) / sizes[order], 0, 1)
        return (share * np.where(there[..., order], work[order], 0.0)).sum(axis=-1)

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
        started = [np.searchsorted(start, moments) for start in starts]
        counts = {index: self._counts[some] for index, some in zip(self.of_rank[rank], started, strict=True)}
        return moments, self._most_work(rank, counts)

    def first_ends(self, origin: int) -> list[float]:
        """The earliest end of every line's first pass."""
        return [float(line.between(0, 1) + start[origin, 0]) for line, start in zip(self.lines, self.starts, strict=True)]

    def last_end(self, origin: int, rank: int) -> float:
        """The earliest end of a rank's last pass."""
        ends = [0.0]
        for index in self.of_rank[rank]:
            line, start = self.lines[index], float(self.starts[index][origin, -1])
            ends.append(start + float(line.between(int(self._numbers[-1]), line.count)))
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
        cost = leanest(problem.costs.stages[stage])
        kept = [cost.checkpoint] if stage in problem.recompute else []
        sizes += [float(size) / problem.splits for size in (cost.activation, cost.retained, *kept) if size > 0]
    least = min(sizes, default=0.0)
    return least if all(abs(size / least - round(size / least)) <= SLACK for size in sizes) else 0.0
