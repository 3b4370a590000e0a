"""From a schedule to one program per rank: where sends, receives and waits go."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import Need, Where, kinds_of
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.lower.program import (
    Collective,
    Compute,
    Copy,
    Exchange,
    Join,
    Message,
    Operation,
    Program,
    Receive,
    Send,
    Validate,
    Wait,
)
from megatron.pipeline.planner.schedule.time.replay import dependency_order
from megatron.pipeline.planner.schedule.time.simulate import simulate

__all__ = ["lower"]


class Transfer(NamedTuple):
    """A message with its two ends, on different ranks.

    Attributes:
        producer: the slot of the pass that makes it, among the passes of the sender.
        consumer: the slot of the pass that needs it, among the passes of the receiver.
    """

    message: Message
    sender: int
    producer: int
    receiver: int
    consumer: int


class Gathering(NamedTuple):
    """A collective with what it comes from and what needs it.

    Attributes:
        producers: (rank, pass); several where every rank has a part.
        consumers: (rank, pass), on other ranks than a single producer's.
        after: the collective that its parts are made from, if it is one rather than a pass.
    """

    collective: Collective
    producers: tuple[tuple[int, Pass], ...]
    consumers: tuple[tuple[int, Pass], ...]
    after: Collective | None = None


def communications(schedule: Schedule) -> Iterator[Transfer | Gathering]:
    """Every transfer and every collective, in an order in which they can be made.

    Raises:
        ValueError: the schedule cannot finish.
    """
    order = ((rank, schedule.passes[rank][slot]) for rank, run in dependency_order(schedule) for slot in run)
    places = {work: place for place, work in enumerate(order)}
    placed: list[tuple[int, Transfer | Gathering]] = [
        (places[one.sender, schedule.passes[one.sender][one.producer]], one) for one in messages(schedule)
    ]
    placed += [(max(places[maker] for maker in one.producers), one) for one in gatherings(schedule)]
    return (one for _, one in sorted(placed, key=itemgetter(0)))


def messages(schedule: Schedule) -> Iterator[Transfer]:
    """Every tensor that has to travel from one rank to another."""
    for rank, passes in enumerate(schedule.passes):
        for slot, (kind, microbatch, chunk) in enumerate(passes):
            if kind.sends_gradient and schedule.placement.stage(rank, chunk) < schedule.frozen:
                continue
            for source in schedule.sources[kind, rank, chunk]:
                if source.hops:
                    ((sender, its_chunk),) = source.homes
                    producer = schedule.rows[sender].first_of(source.kinds, microbatch, its_chunk)
                    assert producer.kind.row.sends is not None
                    message = Message(producer.kind.row.sends, microbatch, schedule.placement.stage(sender, its_chunk))
                    yield Transfer(message, sender, schedule.rows[sender].slots[producer], rank, slot)


def gatherings(schedule: Schedule) -> Iterator[Gathering]:
    """Every collective of a schedule with a spread vocabulary, by microbatch; those of its backwards only where it has any."""
    if not schedule.vocabulary:
        return
    placement, rows = schedule.placement, schedule.rows
    homes = {
        Where.FIRST: [placement.home(0)],
        Where.LAST: [placement.home(placement.last_stage)],
        Where.ALL: [(rank, 0) for rank in range(schedule.ranks)],
    }
    uses: dict[Exchange, list[tuple[Kind, Need]]] = {exchange: [] for exchange in Exchange}
    for kind in Kind:
        for need in kind.row.needs:
            if need.exchange and schedule.vocabulary in (need.modes or Vocabulary):
                uses[need.exchange].append((kind, need))
    for microbatch, (exchange, users) in itertools.product(range(schedule.microbatches), uses.items()):
        _, need = users[0]
        makes = kinds_of(need)
        producers = tuple((rank, rows[rank].first_of(makes, microbatch, chunk)) for rank, chunk in homes[need.where])
        consumers: dict[int, Pass] = {}  # the first on every rank
        for kind, its_need in users:
            for rank, chunk in homes[its_need.on or Where.ALL]:
                work = Pass(kind, microbatch + its_need.delay, chunk)
                if work in rows[rank].all and [rank] != [maker for maker, _ in producers]:
                    consumers.setdefault(rank, work)
        if all(work in rows[rank].all for rank, work in producers) and (consumers or not need.after):
            after = Collective(need.after, microbatch) if need.after else None
            yield Gathering(Collective(exchange, microbatch), producers, tuple(consumers.items()), after)


def lower(schedule: Schedule, costs: Costs, timeline: Timeline | None = None) -> tuple[Program, ...]:
    """Place the sends, receives, collectives and waits of a schedule: one program per rank.

    All transfers and collectives are put into one global order, by the simulated time at which what they carry has been made.
    Every rank starts its parts in that order, so even if each blocked until all its peers reached the matching operation, the
    earliest that is not finished could always go on: nothing can deadlock. Within that order, a Send stands directly after the
    pass that makes its tensor, a Receive and a Join before the pass that runs on their rank at that time, so that the
    communication overlaps that pass, and a Wait directly before the pass that needs the tensor. Where a rank is owed nothing by
    a collective, it waits for it before it joins the next but one of its kind, and so holds the buffers of two. Interlaced, all
    ranks wait for the statistics and the gradients of the output layer where they join them.

    A Copy to host memory stands directly after the pass whose activations it takes, and the Wait for it where the schedule has
    the D2H; a Copy back stands where the schedule has the H2D, and its Wait directly before the pass that needs it.

    A Validate cuts all programs at one moment, that of the first backward (or recomputation): what starts before it, and what
    is made before it, come first. A backward needs a forward of the same microbatch on every stage, so by then every
    rank has begun the iteration, and has ended the one before: whether that one's optimizer step stands is known.

    Args:
        schedule: one that ``verify`` accepts, or its ``forward_only()``.
        costs: what passes and hops take; they decide how early receives are posted, never whether the program is right.
        timeline: of both, where it is known.

    Raises:
        ValueError: the costs are for another number of stages, or the schedule cannot finish.
    """
    timeline = timeline or simulate(schedule, costs)
    ends = [[timed.end for timed in row] for row in timeline.ranks]
    rows = _OperationRows(schedule, timeline)
    backward = min(
        (
            timed.start
            for row, braided in zip(timeline.ranks, rows.braided, strict=True)
            for timed in row
            if timed.work in braided or not (timed.work.kind.is_forward or timed.work.kind.is_copy)
        ),
        default=None,
    )

    # The sort is stable: passes that take no time keep the order in which they depend on each other. So no pass is
    # reached before what it waits for, since that is made before it ends.
    events = [(_moment(one, schedule, ends, costs), one) for one in communications(schedule)]
    queue = deque(sorted(events, key=lambda event: event[0]))
    if backward is not None:
        while queue and queue[0][0] < backward:
            rows.communicate(*queue.popleft())
        rows.validate([sum(timed.start < backward for timed in row) for row in timeline.ranks])
    for event in queue:
        rows.communicate(*event)
    return rows.programs()


def _moment(one: Transfer | Gathering, schedule: Schedule, ends: Sequence[Sequence[float]], costs: Costs) -> float:
    """When all that a communication carries has been made."""
    if isinstance(one, Transfer):
        return ends[one.sender][one.producer]
    made = max(ends[rank][schedule.rows[rank].slots[work]] for rank, work in one.producers)
    return made + (costs.of(one.collective.microbatch).exchange if one.after else 0)


class _OperationRows:
    """The programs of all ranks while they grow, in step with each other."""

    def __init__(self, schedule: Schedule, timeline: Timeline) -> None:
        self._schedule, self._timeline = schedule, timeline
        self._programs: list[list[Operation]] = [[] for _ in schedule.rows]
        self._waits: list[dict[int, list[Wait]]] = [{} for _ in schedule.rows]  # before which slot
        self.braided = [dict(row.braids()) for row in schedule.rows]
        self._reached = [0] * schedule.ranks
        self._unowed: list[dict[Exchange, deque[Collective]]] = [{} for _ in schedule.rows]  # joined, and not waited for

    def compute(self, rank: int, slot: int) -> None:
        """Go on with a rank's passes until the one in that slot is next."""
        passes, waiting, program = self._schedule.passes[rank], self._waits[rank], self._programs[rank]
        for at in range(self._reached[rank], slot):
            program.extend(waiting.get(at, ()))
            program.extend(self._operations(rank, passes[at]))
        self._reached[rank] = max(self._reached[rank], slot)

    def _operations(self, rank: int, work: Pass) -> Iterator[Operation]:
        """Operations that stand for a pass in a program."""
        row = self._schedule.rows[rank]
        if work.kind.is_copy:
            yield Copy(work) if work.kind.row.starts else Wait(work)
            return
        if work in row.awaited:
            yield Wait(row.awaited[work])
        yield Compute(work, self.braided[rank].get(work))
        yield from map(Copy, row.started_by(work))

    def communicate(self, moment: float, one: Transfer | Gathering) -> None:
        """Add a message, or a collective, that is ready to be carried at a moment."""
        if isinstance(one, Gathering):
            self._gather(moment, one)
            return
        message, sender, producer, receiver, consumer = one
        self.compute(sender, producer + 1)
        self._programs[sender].append(Send(message, receiver))
        self._compute_up_to(receiver, moment)
        self._programs[receiver].append(Receive(message, sender))
        self._wait_before(receiver, consumer, Wait(message))

    def _wait_before(self, rank: int, slot: int, wait: Wait) -> None:
        """Wait before a pass; before the forward that it is braided with, if it is."""
        before = slot - bool(self._schedule.passes[rank][slot].kind.row.braided)
        self._waits[rank].setdefault(before, []).append(wait)

    def _gather(self, moment: float, one: Gathering) -> None:
        consumers = dict(one.consumers)
        for rank, work in one.producers:
            self.compute(rank, self._schedule.rows[rank].slots[work] + 1)
        for rank, program in enumerate(self._programs):
            self._compute_up_to(rank, moment, running=one.after is not None)
            wait = Wait(one.collective)
            if self._schedule.vocabulary is Vocabulary.INTERLACED and one.collective.exchange in _IN_STEP:
                program += [Join(one.collective), wait]
                continue
            if rank in consumers:
                self._wait_before(rank, self._schedule.rows[rank].slots[consumers[rank]], wait)
            else:
                unowed = self._unowed[rank].setdefault(one.collective.exchange, deque())
                unowed.append(one.collective)
                if len(unowed) > _UNOWED:
                    program.append(Wait(unowed.popleft()))
            program.append(Join(one.collective))

    def _compute_up_to(self, rank: int, moment: float, running: bool = False) -> None:
        """Compute what has ended before a moment, and what runs then if that is wanted too."""
        slot, row = self._reached[rank], self._timeline.ranks[rank]
        while slot < len(row) and (row[slot].end < moment or (running and row[slot].start < moment)):
            slot += 1
        self.compute(rank, slot)

    def validate(self, begun: Sequence[int]) -> None:
        """Cut all programs; ``begun`` is how many passes of each rank have begun."""
        for rank, program in enumerate(self._programs):
            self.compute(rank, max(self._reached[rank], begun[rank]))
            program.append(Validate())

    def programs(self) -> tuple[Program, ...]:
        """Finish the programs with all that is left."""
        for rank, program in enumerate(self._programs):
            self.compute(rank, len(self._schedule.passes[rank]))
            left = chain(*self._unowed[rank].values())
            program.extend(map(Wait, sorted(left, key=lambda one: one.microbatch)))
        return tuple(map(tuple, self._programs))


_IN_STEP = (Exchange.STATISTICS, Exchange.GRADIENT)  # what all ranks wait for where the vocabulary is interlaced
_UNOWED = 2  # collectives of a kind, that a rank gets nothing from and has not waited for
