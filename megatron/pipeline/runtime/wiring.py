"""Tensors that each pass of one rank takes and makes: read off its program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron.pipeline.planner.schedule.core.kinds import Flow, Where, sources
from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.lower.program import Compute, Message, Program, Send, Wait


class Wiring(NamedTuple):
    """The messages of one rank's passes, also those between two stages of this rank.

    Attributes:
        takes, makes: the message that a pass needs, and the one that it makes; most have one of each.
        answers: by backward, the message that its forward has sent, and to which pipeline rank. It has been received once the
            backward has its gradients.
    """

    takes: Mapping[Pass, Message]
    makes: Mapping[Pass, Message]
    answers: Mapping[Pass, tuple[Message, int]]


def wiring(program: Program, rank: int, placement: Placement) -> Wiring:
    """The wiring of a program.

    Args:
        rank: the one that runs the program.
        placement: of the stages. Two neighbours on one rank hand over their tensors without a message.
    """
    takes: dict[Pass, Message] = {}
    makers: dict[Message, Pass] = {}
    peers: dict[Message, int] = {}  # of what is sent
    awaited: dict[Flow, Message] = {}  # before the next pass
    passes: list[Pass] = []
    for operation in program:
        match operation:
            case Wait(Message() as message):
                awaited[message.flow] = message
            case Send(message, peer):
                peers[message] = peer
            case Compute(work, braided):
                passes.append(work)
                for flow, message in awaited.items():  # a braid waits for what both of its halves take
                    takes[braided if braided and flow is Flow.GRADIENT else work] = message
                awaited.clear()
                if work.kind.row.sends:
                    makers[Message(work.kind.row.sends, work.microbatch, placement.stage(rank, work.chunk))] = work
    for work in passes:
        if (given := _handed_over(work, rank, placement)) in makers:
            takes[work], peers[given] = given, rank
    answers = {
        taker: (activation, peers[activation])
        for taker, message in takes.items()
        if message.flow is Flow.GRADIENT
        and (activation := Message(Flow.ACTIVATION, taker.microbatch, placement.stage(rank, taker.chunk))) in peers
    }
    return Wiring(takes, {makers[message]: message for message in peers}, answers)


def _handed_over(work: Pass, rank: int, placement: Placement) -> Message | None:
    """Tensors that a pass takes from a neighbouring stage on its own rank."""
    for source in sources(placement, None)[work.kind, rank, work.chunk]:
        (home, chunk), flow = source.homes[0], source.kinds[0].row.sends
        if flow and home == rank and source.need.where in (Where.PREVIOUS, Where.NEXT):
            return Message(flow, work.microbatch, placement.stage(rank, chunk))
    return None
