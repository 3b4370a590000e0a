"""From a schedule to one program per rank: where sends, receives and waits go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from megatron.pipeline.schedule.costs import Costs
from megatron.pipeline.schedule.passes import Kind
from megatron.pipeline.schedule.placement import Placement
from megatron.pipeline.schedule.program import Compute, Flow, Message, Operation, Program, Receive, Send, Validate, Wait
from megatron.pipeline.schedule.schedule import Schedule
from megatron.pipeline.schedule.simulate import dependency_order, simulate


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


def transfers(schedule: Schedule) -> Iterator[Transfer]:
    """Every tensor that has to travel from one rank to another, in an order in which they can be made.

    Raises:
        ValueError: the schedule cannot finish.
    """
    slots: list[dict[tuple[Kind, int, int], int]] = [
        {work: slot for slot, work in enumerate(passes)} for passes in schedule.passes
    ]
    leaving = _links(schedule.placement)
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


def lower(schedule: Schedule, costs: Costs) -> tuple[Program, ...]:
    """Place the sends, receives and waits of a schedule: one program per rank.

    All transfers are put into one global order, by the simulated time at which they are sent. Every rank starts its
    sends and receives in that order, so even if each blocked until its peer reached the matching operation, the
    earliest transfer that is not finished could always go on: nothing can deadlock. Within that order, a Send stands
    directly after the pass that makes its tensor, a Receive before the pass that runs on its rank when the tensor is
    sent, so that the transfer overlaps that pass, and a Wait directly before the pass that needs the tensor.

    A Validate cuts all programs at one moment, that of the first backward (or recomputation): what starts before it, and the
    messages sent before it, come first. A backward needs a forward of the same microbatch on every stage, so by then every
    rank has begun the iteration, and has ended the one before: whether that one's optimizer step stands is known.

    Args:
        schedule: one that ``verify`` accepts, or its ``forward_only()``.
        costs: what passes and hops take; they decide how early receives are posted, never whether the program is right.

    Raises:
        ValueError: the costs are for another number of stages, or the schedule cannot finish.
    """
    timeline = simulate(schedule, costs)
    ends = [[timed.end for timed in row] for row in timeline.ranks]
    backward = min((timed.start for row in timeline.ranks for timed in row if timed.work.kind is not Kind.F), default=None)
    programs: list[list[Operation]] = [[] for _ in ends]
    waits: list[dict[int, Wait]] = [{} for _ in ends]  # before which slot
    reached = [0] * schedule.ranks

    def compute(rank: int, slot: int) -> None:
        """Go on with a rank's passes until the one in that slot is next."""
        passes, waiting, program = schedule.passes[rank], waits[rank], programs[rank]
        for at in range(reached[rank], slot):
            if at in waiting:
                program.append(waiting[at])
            program.append(Compute(passes[at]))
        reached[rank] = slot

    def transfer(message: Message, sender: int, producer: int, receiver: int, consumer: int) -> None:
        compute(sender, producer + 1)
        programs[sender].append(Send(message, receiver))
        sent, slot = ends[sender][producer], reached[receiver]
        while ends[receiver][slot] < sent:
            slot += 1
        compute(receiver, slot)
        programs[receiver].append(Receive(message, sender))
        waits[receiver][consumer] = Wait(message)

    # The sort is stable: passes that take no time keep the order in which they depend on each other. So no pass is
    # reached before what it waits for, since that is sent before it ends.
    queue = deque(sorted(transfers(schedule), key=lambda t: ends[t.sender][t.producer]))
    if backward is not None:
        while queue and ends[queue[0].sender][queue[0].producer] < backward:
            transfer(*queue.popleft())
        for rank, row in enumerate(timeline.ranks):
            compute(rank, max(reached[rank], sum(timed.start < backward for timed in row)))
            programs[rank].append(Validate())
    for one in queue:
        transfer(*one)
    for rank, passes in enumerate(schedule.passes):
        compute(rank, len(passes))
    return tuple(map(tuple, programs))


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
