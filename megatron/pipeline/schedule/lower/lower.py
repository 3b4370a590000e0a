"""From a schedule to one program per rank: where sends, receives and waits go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import Kind, Pass, Vocabulary
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.schedule import MOST_WAITING, Schedule
from megatron.pipeline.schedule.core.timeline import Timeline
from megatron.pipeline.schedule.lower.program import (
    Collective,
    Compute,
    Copy,
    Exchange,
    Flow,
    Join,
    Message,
    Operation,
    Program,
    Receive,
    Send,
    Validate,
    Wait,
)
from megatron.pipeline.schedule.time.lanes import returning
from megatron.pipeline.schedule.time.replay import dependency_order
from megatron.pipeline.schedule.time.simulate import simulate


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


def transfers(schedule: Schedule) -> Iterator[Transfer]:
    """Every tensor that has to travel from one rank to another, in an order in which they can be made.

    Raises:
        ValueError: the schedule cannot finish.
    """
    return (one for one in communications(schedule) if isinstance(one, Transfer))


def communications(schedule: Schedule) -> Iterator[Transfer | Gathering]:
    """Every transfer and every collective, in an order in which they can be made.

    Raises:
        ValueError: the schedule cannot finish.
    """
    slots: list[dict[tuple[Kind, int, int], int]] = [
        {work: slot for slot, work in enumerate(passes)} for passes in schedule.passes
    ]
    leaving = _links(schedule.placement)
    gathered = _Parts(schedule)
    for rank, run in dependency_order(schedule):
        passes, links = schedule.passes[rank], leaving[rank]
        for slot in run:
            kind, microbatch, chunk = passes[slot]
            if (link := links[chunk].get(kind)) is not None:
                flow, stage, receiver, its_chunk, kinds = link
                for its_kind in kinds:
                    consumer = slots[receiver].get((its_kind, microbatch, its_chunk))
                    if consumer is not None:
                        yield Transfer(Message(flow, microbatch, stage), rank, slot, receiver, consumer)
            if schedule.vocabulary:
                yield from gathered.made(rank, passes[slot])


class _Parts:
    """Which parts of collectives have been made."""

    def __init__(self, schedule: Schedule) -> None:
        self._waiting: dict[tuple[int, Pass], list[Gathering]] = {}
        self._missing: dict[Collective, int] = {}
        for one in gatherings(schedule):
            self._missing[one.collective] = len(one.producers)
            for producer in one.producers:
                self._waiting.setdefault(producer, []).append(one)

    def made(self, rank: int, work: Pass) -> Iterator[Gathering]:
        """The collectives of which a pass has made the last part."""
        for one in self._waiting.get((rank, work), ()):
            self._missing[one.collective] -= 1
            if not self._missing[one.collective]:
                yield one


def gatherings(schedule: Schedule) -> Iterator[Gathering]:
    """Every collective of a schedule with a spread vocabulary, by microbatch; those of its backwards only where it has any."""
    if not schedule.vocabulary:
        return
    placement, ranks = schedule.placement, range(schedule.ranks)
    (first, first_chunk), (last, last_chunk) = placement.home(0), placement.home(placement.last_stage)
    trains = any(not work.kind.is_forward for work in schedule.passes[0])

    def everywhere(kind: Kind, but: int | None = None) -> tuple[tuple[int, Pass], ...]:
        return tuple((rank, Pass(kind, microbatch)) for rank in ranks if rank != but)

    for microbatch in range(schedule.microbatches):
        inside, outside = ((first, Pass(Kind.F, microbatch, first_chunk)), (last, Pass(Kind.F, microbatch, last_chunk)))
        later = microbatch + MOST_WAITING  # needs the room that the parts take
        freed = [(rank, Pass(Kind.IF, later)) for rank in ranks if rank != first and later < schedule.microbatches]
        yield Gathering(Collective(Exchange.EMBEDDING, microbatch), everywhere(Kind.IF), (inside, *freed))
        yield Gathering(Collective(Exchange.OUTPUT, microbatch), (outside,), everywhere(Kind.S, but=last))
        statistics = Collective(Exchange.STATISTICS, microbatch)
        yield Gathering(statistics, everywhere(Kind.S), everywhere(Kind.T) if trains else ())
        if not trains:
            continue
        back, front = (
            (rank, Pass(schedule.backward_kind(rank, microbatch, chunk), microbatch, chunk))
            for rank, chunk in ((last, last_chunk), (first, first_chunk))
        )
        gradient = Collective(Exchange.GRADIENT, microbatch)
        if schedule.vocabulary is Vocabulary.ONE_BARRIER:
            yield Gathering(gradient, everywhere(Kind.S), (back,), after=statistics)
        else:
            yield Gathering(gradient, everywhere(Kind.T), (back,))
        yield Gathering(Collective(Exchange.EMBEDDING_GRADIENT, microbatch), (front,), everywhere(Kind.IB, but=first))


def lower(schedule: Schedule, costs: Costs) -> tuple[Program, ...]:
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

    Raises:
        ValueError: the costs are for another number of stages, or the schedule cannot finish.
    """
    timeline = simulate(schedule, costs)
    ends = [[timed.end for timed in row] for row in timeline.ranks]
    training = (timed for row in timeline.ranks for timed in row if not (timed.work.kind.is_forward or timed.work.kind.is_copy))
    backward = min((timed.start for timed in training), default=None)
    rows = _Rows(schedule, timeline)

    # The sort is stable: passes that take no time keep the order in which they depend on each other. So no pass is
    # reached before what it waits for, since that is made before it ends.
    events = [(_moment(one, rows.slots, ends, costs), one) for one in communications(schedule)]
    queue = deque(sorted(events, key=lambda event: event[0]))
    if backward is not None:
        while queue and queue[0][0] < backward:
            rows.communicate(*queue.popleft())
        rows.validate([sum(timed.start < backward for timed in row) for row in timeline.ranks])
    for event in queue:
        rows.communicate(*event)
    return rows.programs()


def _moment(
    one: Transfer | Gathering, slots: Sequence[Mapping[Pass, int]], ends: Sequence[Sequence[float]], costs: Costs
) -> float:
    """When all that a communication carries has been made."""
    if isinstance(one, Transfer):
        return ends[one.sender][one.producer]
    made = max(ends[rank][slots[rank][work]] for rank, work in one.producers)
    return made + (costs.exchange if one.after else 0)


class _Rows:
    """The programs of all ranks while they grow, in step with each other."""

    def __init__(self, schedule: Schedule, timeline: Timeline) -> None:
        self._schedule, self._timeline = schedule, timeline
        self.slots = [{work: slot for slot, work in enumerate(passes)} for passes in schedule.passes]
        self._programs: list[list[Operation]] = [[] for _ in self.slots]
        self._waits: list[dict[int, Wait]] = [{} for _ in self.slots]  # before which slot
        self._reached = [0] * schedule.ranks
        self._returning = [returning(passes) for passes in schedule.passes]
        self._unowed: list[dict[Exchange, deque[Collective]]] = [{} for _ in self.slots]  # joined, and not waited for

    def compute(self, rank: int, slot: int) -> None:
        """Go on with a rank's passes until the one in that slot is next."""
        passes, waiting, program = self._schedule.passes[rank], self._waits[rank], self._programs[rank]
        for at in range(self._reached[rank], slot):
            if at in waiting:
                program.append(waiting[at])
            program.extend(self._operations(rank, passes[at]))
        self._reached[rank] = max(self._reached[rank], slot)

    def _operations(self, rank: int, work: Pass) -> Iterator[Operation]:
        """What stands for a pass in a program."""
        if work.kind is Kind.D2H:
            yield Wait(work)
        elif work.kind is Kind.H2D:
            yield Copy(work)
        else:
            if work in self._returning[rank]:
                yield Wait(self._returning[rank][work])
            yield Compute(work)
            if work.kind is Kind.F and self._schedule.offloads(rank, work):
                yield Copy(work._replace(kind=Kind.D2H))

    def communicate(self, moment: float, one: Transfer | Gathering) -> None:
        if isinstance(one, Transfer):
            self._transfer(moment, *one)
        else:
            self._gather(moment, one)

    def _transfer(self, sent: float, message: Message, sender: int, producer: int, receiver: int, consumer: int) -> None:
        self.compute(sender, producer + 1)
        self._programs[sender].append(Send(message, receiver))
        self._compute_up_to(receiver, sent)
        self._programs[receiver].append(Receive(message, sender))
        self._waits[receiver][consumer] = Wait(message)

    def _gather(self, moment: float, one: Gathering) -> None:
        consumers = dict(one.consumers)
        for rank, work in one.producers:
            self.compute(rank, self.slots[rank][work] + 1)
        for rank, program in enumerate(self._programs):
            self._compute_up_to(rank, moment, running=one.after is not None)
            wait = Wait(one.collective)
            if self._schedule.vocabulary is Vocabulary.INTERLACED and one.collective.exchange in _IN_STEP:
                program += [Join(one.collective), wait]
                continue
            if rank in consumers:
                self._waits[rank][self.slots[rank][consumers[rank]]] = wait
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
        """What has grown, with all that is left."""
        for rank, program in enumerate(self._programs):
            self.compute(rank, len(self._schedule.passes[rank]))
            left = chain(*self._unowed[rank].values())
            program.extend(map(Wait, sorted(left, key=lambda one: one.microbatch)))
        return tuple(map(tuple, self._programs))


_IN_STEP = (Exchange.STATISTICS, Exchange.GRADIENT)  # what all ranks wait for where the vocabulary is interlaced
_UNOWED = 2  # collectives of a kind, that a rank gets nothing from and has not waited for


class _Link(NamedTuple):
    """What passes of one kind on one stage send to a neighbour on another rank."""

    flow: Flow
    stage: int
    receiver: int
    chunk: int  # on the receiver
    kinds: tuple[Kind, ...]  # of passes that need it there, of which a microbatch has one


def _links(placement: Placement) -> list[list[dict[Kind, _Link]]]:
    """The links of every rank and chunk, by the kind of the passes."""
    links: list[list[dict[Kind, _Link]]] = [[{} for _ in row] for row in placement.stages]
    for stage in range(placement.last_stage):
        (rank, chunk), (after, its_chunk) = placement.home(stage), placement.home(stage + 1)
        if rank != after and not placement.is_last(stage):
            links[rank][chunk][Kind.F] = _Link(Flow.ACTIVATION, stage, after, its_chunk, (Kind.F,))
            for kind in (Kind.B, Kind.BW):
                links[after][its_chunk][kind] = _Link(Flow.GRADIENT, stage + 1, rank, chunk, (Kind.B, Kind.BW))
    return links
