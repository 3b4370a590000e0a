"""Tensors that each pass of one rank takes and makes: read off its program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megatron.pipeline.planner import Pass, Placement, kinds, ops


class Wiring(NamedTuple):
    """The messages of one rank's passes, also those between two stages of this rank.

    Attributes:
        takes, makes: the message that a pass needs, and the one that it makes; most have one of each.
        answers: by backward, the message that its forward has sent, and to which pipeline rank. It has been received once the
            backward has its gradients; one that needs none waits for that.
    """

    takes: Mapping[Pass, ops.Message]
    makes: Mapping[Pass, ops.Message]
    answers: Mapping[Pass, tuple[ops.Message, int]]


def wiring(program: ops.Program, rank: int, placement: Placement, frozen: int = 0) -> Wiring:
    """The wiring of a program.

    Args:
        frozen: see ``Schedule.frozen``.
        rank: the one that runs the program.
        placement: of the stages. Two neighbours on one rank hand over their tensors without a message.
    """
    takes: dict[Pass, ops.Message] = {}
    makers: dict[ops.Message, Pass] = {}
    peers: dict[ops.Message, int] = {}  # of what is sent
    awaited: dict[kinds.Flow, ops.Message] = {}  # before the next pass
    passes: list[Pass] = []
    for operation in program:
        match operation:
            case ops.Wait(ops.Message() as message):
                awaited[message.flow] = message
            case ops.Send(message, peer):
                peers[message] = peer
            case ops.Compute(work, braided):
                passes.append(work)
                for flow, message in awaited.items():  # a braid waits for what both of its halves take
                    takes[braided if braided and flow is kinds.Flow.GRADIENT else work] = message
                awaited.clear()
                if work.kind.row.sends:
                    makers[ops.Message(work.kind.row.sends, work.microbatch, placement.stage(rank, work.chunk))] = work
    unneeded = {work for work in passes if work.kind.sends_gradient and placement.stage(rank, work.chunk) < frozen}
    for work in passes:
        if work not in unneeded and (given := _handed_over(work, rank, placement)) in makers:
            takes[work], peers[given] = given, rank
    answers = {
        taker: (activation, peers[activation])
        for taker in (*unneeded, *(taker for taker, message in takes.items() if message.flow is kinds.Flow.GRADIENT))
        if (activation := ops.Message(kinds.Flow.ACTIVATION, taker.microbatch, placement.stage(rank, taker.chunk))) in peers
    }
    return Wiring(takes, {makers[message]: message for message in peers}, answers)


def _handed_over(work: Pass, rank: int, placement: Placement) -> ops.Message | None:
    """Tensors that a pass takes from a neighbouring stage on its own rank."""
    for source in kinds.sources(placement, None)[work.kind, rank, work.chunk]:
        (home, chunk), flow = source.homes[0], source.kinds[0].row.sends
        if flow and home == rank and source.need.where in (kinds.Where.PREVIOUS, kinds.Where.NEXT):
            return ops.Message(flow, work.microbatch, placement.stage(rank, chunk))
    return None
