"""From a schedule to one program per rank: where sends, receives and waits go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from megatron.pipeline.schedule.costs import Costs
from megatron.pipeline.schedule.passes import Kind, Pass
from megatron.pipeline.schedule.program import Compute, Flow, Message, Operation, Program, Receive, Send, Wait
from megatron.pipeline.schedule.schedule import Schedule
from megatron.pipeline.schedule.simulate import dependency_order, simulate


class Transfer(NamedTuple):
    """A message with its two ends: the pass that makes it and the pass that needs it, on different ranks."""

    message: Message
    sender: int
    producer: Pass
    receiver: int
    consumer: Pass


def transfers(schedule: Schedule) -> Iterator[Transfer]:
    """Every tensor that has to travel from one rank to another, in an order in which they can be made.

    Raises:
        ValueError: the schedule cannot finish.
    """
    arriving: dict[tuple[int, Pass], tuple[int, Pass]] = {}  # producer -> consumer, where the ranks differ
    for rank, passes in enumerate(schedule.passes):
        for work in passes:
            for sender, producer in schedule.predecessors(rank, work):
                if sender != rank:
                    arriving[sender, producer] = rank, work
    for sender, producer in dependency_order(schedule):
        if (sender, producer) in arriving:
            flow = Flow.ACTIVATION if producer.kind is Kind.F else Flow.GRADIENT
            message = Message(flow, producer.microbatch, schedule.placement.stage(sender, producer.chunk))
            yield Transfer(message, sender, producer, *arriving[sender, producer])


def lower(schedule: Schedule, costs: Costs) -> tuple[Program, ...]:
    """Place the sends, receives and waits of a schedule: one program per rank.

    All transfers are put into one global order, by the simulated time at which they are sent. Every rank starts its
    sends and receives in that order, so even if each blocked until its peer reached the matching operation, the
    earliest transfer that is not finished could always go on: nothing can deadlock. Within that order, a Send stands
    directly after the pass that makes its tensor, a Receive before the pass that runs on its rank when the tensor is
    sent, so that the transfer overlaps that pass, and a Wait directly before the pass that needs the tensor.

    Args:
        schedule: one that ``verify`` accepts, or its ``forward_only()``.
        costs: what passes and hops take; they decide how early receives are posted, never whether the program is right.

    Raises:
        ValueError: the costs are for another number of stages, or the schedule cannot finish.
    """
    ranks = simulate(schedule, costs).ranks
    index = {(rank, timed.work): slot for rank, row in enumerate(ranks) for slot, timed in enumerate(row)}

    def sent(transfer: Transfer) -> float:
        return ranks[transfer.sender][index[transfer.sender, transfer.producer]].end

    # before[rank][slot] are the sends and receives between pass slot-1 and pass slot; reached[rank] is the last such slot.
    before: list[dict[int, list[Operation]]] = [defaultdict(list) for _ in ranks]
    waits: dict[tuple[int, Pass], Wait] = {}
    reached = [0] * schedule.ranks
    # The sort is stable: passes that take no time keep the order in which they depend on each other.
    for transfer in sorted(transfers(schedule), key=sent):
        message, sender, producer, receiver, consumer = transfer
        reached[sender] = index[sender, producer] + 1
        before[sender][reached[sender]].append(Send(message, receiver))
        while ranks[receiver][reached[receiver]].end < sent(transfer):
            reached[receiver] += 1
        before[receiver][reached[receiver]].append(Receive(message, sender))
        waits[receiver, consumer] = Wait(message)

    programs: list[Program] = []
    for rank, row in enumerate(ranks):
        program: list[Operation] = []
        for slot, timed in enumerate(row):
            program += before[rank].get(slot, [])
            if (rank, timed.work) in waits:
                program.append(waits[rank, timed.work])
            program.append(Compute(timed.work))
        program += before[rank].get(len(row), [])
        programs.append(tuple(program))
    return tuple(programs)
