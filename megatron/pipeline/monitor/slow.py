"""Slow ranks and links: those whose passes or messages take longer than they did, or than those of ranks with equal work, for
several iterations on end.

Without torch: ``taken`` reads an iteration's report, ``Gauge`` says what is more than usual in it, ``added`` what that costs,
and ``Verdict`` whether it lasts.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import lru_cache
from statistics import median, median_low
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from megatron.pipeline.planner import Costs, Schedule, ops, simulate

if TYPE_CHECKING:
    from megatron.pipeline.monitor.report import Report

ENTER, LEAVE = 0.05, 0.025  # shares of an iteration: what costs more is slow; what costs less than LEAVE no longer is
LASTING, LONGEST = 3, 96  # iterations on end that a change has to last: at first, and of what has come and gone often
_WAIT = 0.05  # of a pass: a shorter wait is none
FEWEST, _KEPT = 5, 32  # iterations from which what is usual is known; of which it is the median

Thing: TypeAlias = int | tuple[int, int]  # a rank of a pipeline, or a link: two neighbours


class Excess(NamedTuple):
    """More than usual.

    Attributes:
        there: of a link, seconds of a message in its order; of a rank, the share by which its passes take longer.
        back: seconds of a message the other way.
    """

    there: float = 0.0
    back: float = 0.0


def things(ranks: int) -> list[Thing]:
    """All that can be slow in a pipeline."""
    return [*range(ranks), *((rank, (rank + 1) % ranks) for rank in range(ranks if ranks > 2 else ranks - 1))]


class Taken(NamedTuple):
    """Times of an iteration.

    Attributes:
        ranks: seconds of their passes over those that costs predict: a batch with long microbatches counts as its loads say,
            where it was planned for them.
        passes: the same seconds, and how many passes of every kind they are of.
        ways: by sender and receiver, the least seconds from the end of a pass until a message with its result was there, by their
            two clocks; and whether that was there before it was waited for: it may then have come earlier.
    """

    ranks: dict[int, float]
    passes: dict[int, tuple[float, Counter[str]]]
    ways: dict[tuple[int, int], tuple[float, bool]]


def taken(report: Report, costs: Costs) -> Taken:
    """Read it from a report."""
    known, made, found = report.schedule.costs(costs.with_loads(report.loads)), {}, Taken({}, {}, {})
    for rank, (record, stages) in enumerate(zip(report.ranks, report.schedule.placement.stages, strict=True)):
        seconds = predicted = 0.0
        kinds = Counter[str]()
        for work, start, end in record.passes:
            if work.kind.row.sends:
                made[ops.Message(work.kind.row.sends, work.microbatch, stages[work.chunk])] = rank, end
            if not work.kind.is_copy:
                seconds += end - start
                kinds.update(work.kind.row.replaces or [work.kind])
                predicted += known.of(work.microbatch).seconds(work.kind, stages[work.chunk])
        if seconds and predicted:
            found.ranks[rank], found.passes[rank] = seconds / predicted, (seconds, kinds)
    for rank, record in enumerate(report.ranks):
        shortest = _WAIT * sum(end - start for _, start, end in record.passes) / max(1, len(record.passes))
        for message, start, there in record.waits:
            sender, end = made.get(message, (rank, there)) if isinstance(message, ops.Message) else (rank, there)
            if sender != rank:  # else it waited until the message had gone
                delay = there - end, there - start < shortest
                found.ways[sender, rank] = min(delay, found.ways.get((sender, rank), delay))
    return found


class Gauge:
    """Usual times of one pipeline: medians over its last iterations in which nothing was slow.

    Args:
        works: of every rank, what it has to do: those of which it is equal take equally long, and are compared with each other.
    """

    def __init__(self, ranks: int, works: Sequence[Hashable] = ()) -> None:
        self._things, self._works = things(ranks), works or range(ranks)
        self._kept: defaultdict[Thing, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    @property
    def hop(self) -> float:
        """Seconds of a message: half of there and back, for which clocks do not matter."""
        usual = self._usual
        both = [usual[way] + usual[way[::-1]] for way in usual if isinstance(way, tuple) and way[::-1] in usual]
        return max(0.0, median(both) / 2) if both else 0.0

    @property
    def _usual(self) -> dict[Thing, float]:
        return {thing: median(kept) for thing, kept in self._kept.items() if len(kept) >= FEWEST}

    def excess(self, taken: Taken, slow: Mapping[Thing, Excess]) -> dict[Thing, Excess]:
        """More than usual in an iteration, of every rank and link of which that is known.

        All ranks are slow together where a batch is long or a room is hot: how much longer a rank's passes take is compared with
        half of the ranks, too. One is not slow because others have become faster. Of ranks with equal work one is slow that takes
        longer than half of them, however long it has.

        Args:
            slow: what was slow before.
        """
        usual = self._usual
        times = {rank: each / usual[rank] for rank, each in taken.ranks.items() if rank in usual}
        found: dict[Thing, Excess] = {
            rank: Excess(each / max(1.0, median_low(times.values())) - 1) for rank, each in times.items()
        }
        for rank in times:
            own = self._works[rank], taken.passes[rank][1]
            alike = [taken.passes[other][0] for other in times if (self._works[other], taken.passes[other][1]) == own]
            found[rank] = Excess(taken.passes[rank][0] / median_low(alike) - 1) if len(alike) > 1 else found[rank]
        for link in self._things:
            if isinstance(link, tuple) and {link, link[::-1]} <= usual.keys() & taken.ways.keys():
                there, back = (taken.ways[way] for way in (link, link[::-1]))
                most = _by_one_clock(there[0] - usual[link], back[0] - usual[link[::-1]])
                found[link] = _likely(most, slow.get(link, Excess()), (there[1], back[1]))
        return found

    def learn(self, taken: Taken, slow: Mapping[Thing, Excess], doubtful: Collection[Thing]) -> None:
        """Count an iteration as usual.

        Args:
            slow: of these ranks what the iteration would have shown without it counts, for the pace of all may change meanwhile.
            doubtful: that may be slow: they do not count.
        """
        for rank, times in taken.ranks.items():
            if rank in slow or rank not in doubtful:
                self._kept[rank].append(times / (1 + slow.get(rank, Excess()).there))
        for way, (seconds, _) in taken.ways.items():
            self._kept[way].extend([] if {way, way[::-1]} & {*slow, *doubtful} else [seconds])


def _by_one_clock(there: float, back: float) -> Excess:
    """A clock that was set makes messages later one way, and earlier the other way by as much."""
    both = max(0.0, there + back)
    if min(there, back) >= 0:
        return Excess(there, back)
    return Excess(both, 0.0) if there > back else Excess(0.0, both)


def _likely(most: Excess, before: Excess, early: tuple[bool, bool]) -> Excess:
    """The excess of messages of which only the most is known the ways in which all were early: no more than before, and where the
    other way is known, times as much of that as there."""
    times = [1.0 if unknown or not was else now / was for now, was, unknown in zip(most, before, early, strict=True)]
    there, back = (min(now, other * was) for now, was, other in zip(most, before, times[::-1], strict=True))
    return Excess(there if early[0] else most.there, back if early[1] else most.back)


def slowed(costs: Costs, schedule: Schedule, found: Mapping[Thing, Excess]) -> Costs:
    """The costs of a training with what is slow in it."""
    ranks = {thing: 1 + more.there for thing, more in found.items() if isinstance(thing, int)}
    links = [(thing, more) for thing, more in found.items() if isinstance(thing, tuple)]
    ways = {link: more.there for link, more in links} | {link[::-1]: more.back for link, more in links}
    return costs.slowed(schedule.placement, ranks, ways)


def added(costs: Costs, schedule: Schedule, found: Mapping[Thing, Excess]) -> tuple[float, dict[Thing, float]]:
    """The seconds of an iteration as usual, and the share of them that each adds to it: 0 where that is clearly too little."""
    usual, messages = _makespan(schedule, costs), schedule.slices * schedule.placement.chunks

    def share(thing: Thing, more: Excess) -> float:
        if (more.there if isinstance(thing, int) else sum(more) * messages / usual) <= LEAVE:
            return 0.0
        return max(0.0, simulate(schedule, slowed(costs, schedule, {thing: more})).makespan / usual - 1)

    return usual, {thing: share(thing, more) for thing, more in found.items()}


@lru_cache(maxsize=4)  # asked in every iteration, mostly of the same schedule
def _makespan(schedule: Schedule, costs: Costs) -> float:
    return simulate(schedule, costs).makespan


class Verdict:
    """Verdict on one thing: it is slow, or as usual.

    What comes and goes has to last twice as long every time that it has gone, up to ``LONGEST``: N iterations have at most a few
    times log2(N) changes, or one in about ``LONGEST``.

    Attributes:
        share: of an iteration that it costs; 0 while it is as usual.
        excess: that costs it.
        patience: iterations on end that a change has to last.
    """

    def __init__(self) -> None:
        self.share, self.excess, self.patience = 0.0, Excess(), LASTING
        self._change, self._run = "", list[tuple[float, Excess]]()  # what the last iterations want, on end, and why

    def take(self, share: float, excess: Excess) -> bool:
        """Take note of what an iteration showed.

        Returns:
            Whether it is slow from now on, or as usual again, or more or less slow by a factor of two.
        """
        change = "slow" if not self.share and share > ENTER else "usual" if self.share and share < LEAVE else ""
        if self.share and share > ENTER and not self.share / 2 <= share <= 2 * self.share:
            change = "more" if share > self.share else "less"
        self._run = [*self._run, (share, excess)] if change == self._change else [(share, excess)]
        self._change = change
        if not change or len(self._run) < self.patience:
            return False
        shares, excesses = zip(*self._run[-LASTING:], strict=True)
        self.share, self.excess = 0.0 if change == "usual" else median(shares), Excess(*map(median, zip(*excesses, strict=True)))
        if change in ("usual", "less"):
            self.patience = min(2 * self.patience, LONGEST)
        self._change, self._run = "", []
        return True
