"""Which tensors each pass of one rank takes and makes, and which rank is at their other end: read off its program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron.pipeline.schedule.core.kinds import Flow, Where, sources
from megatron.pipeline.schedule.core.passes import Pass
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.lower.program import Compute, Message, Program, Receive, Send, Wait

Ends = tuple[tuple[Message, int], ...]  # messages, each with the pipeline rank at its other end


class Wiring(NamedTuple):
    """The messages of one rank's passes. A message between two stages of this rank has the rank itself at its other end.

    A stage may have several stages before it and several behind it, each on a rank of its own: a forward then takes a message
    from each of the former, and sends its output to each of the latter. Its backward takes a gradient from each of the latter,
    and sends to each of the former the gradient by what came from there.

    Attributes:
        takes: messages that a pass needs.
        makes: messages that a pass makes. Those to several ranks may have the same name.
        answers: messages of the forward before a backward. They have been received once the backward has its gradients.
    """

    takes: Mapping[Pass, Ends]
    makes: Mapping[Pass, Ends]
    answers: Mapping[Pass, Ends]


def wiring(program: Program, rank: int, placement: Placement) -> Wiring:
    """The wiring of a program.

    Args:
        rank: the one that runs the program.
        placement: of the stages. Two neighbours on one rank hand over their tensors without a message.
    """
    takes: defaultdict[Pass, list[tuple[Message, int]]] = defaultdict(list)
    makes: defaultdict[Pass, list[tuple[Message, int]]] = defaultdict(list)
    peers: dict[Message, int] = {}
    awaited: list[Message] = []  # before the next pass
    makers: dict[Message, Pass] = {}
    for operation in program:
        match operation:
            case Receive(message, peer):
                peers[message] = peer
            case Wait(Message() as message):
                awaited.append(message)
            case Send(message, peer):
                makes[makers[message]].append((message, peer))
            case Compute(work, braided):
                takes.setdefault(work, [])
                for message in awaited:  # a braid waits for what both of its halves take
                    taker = braided if braided and message.flow is Flow.GRADIENT else work
                    takes[taker].append((message, peers[message]))
                awaited.clear()
                if work.kind.row.sends:
                    makers[Message(work.kind.row.sends, work.microbatch, placement.stage(rank, work.chunk))] = work
    for taker in [*takes]:
        for message in _handed_over(taker, rank, placement):
            if message in makers:
                takes[taker].append((message, rank))
                makes[makers[message]].append((message, rank))
    answers: dict[Pass, Ends] = {}
    for taker, messages in takes.items():
        activation = Message(Flow.ACTIVATION, taker.microbatch, placement.stage(rank, taker.chunk))
        if activation in makers and any(message.flow is Flow.GRADIENT for message, _ in messages):
            answers[taker] = tuple(makes[makers[activation]])
    return Wiring(_frozen(takes), _frozen(makes), answers)


def _handed_over(work: Pass, rank: int, placement: Placement) -> Iterator[Message]:
    """What a pass takes from neighbouring stages on its own rank."""
    for source in sources(placement, None)[work.kind, rank, work.chunk] if not work.part else ():
        (home, chunk), flow = source.homes[0], source.kinds[0].row.sends
        if flow and home == rank and source.need.where in (Where.PREVIOUS, Where.NEXT):
            yield Message(flow, work.microbatch, placement.stage(rank, chunk))


def _frozen(table: Mapping[Pass, Sequence[tuple[Message, int]]]) -> dict[Pass, Ends]:
    return {work: tuple(ends) for work, ends in table.items()}
