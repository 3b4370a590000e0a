"""Which tensors each pass of one rank takes and makes, and which rank is at their other end: read off its program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.lower.program import Compute, Flow, Message, Program, Receive, Send, Wait

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


def wiring(program: Program, rank: int, stages: Sequence[int]) -> Wiring:
    """The wiring of a program that ``lower`` has made.

    Args:
        rank: the one that runs the program.
        stages: of the rank's chunks. Two that follow each other in the model hand over their tensors without a message.
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
            case Compute(work):
                takes[work] += ((message, peers[message]) for message in awaited)
                awaited.clear()
                if (flow := _flow(work.kind)) is not None:
                    makers[Message(flow, work.microbatch, stages[work.chunk])] = work
    for taker in makers.values():
        flow, stage = _flow(taker.kind), stages[taker.chunk]
        assert flow is not None
        handed_over = Message(flow, taker.microbatch, stage - 1 if flow is Flow.ACTIVATION else stage + 1)
        if handed_over in makers:
            takes[taker].append((handed_over, rank))
            makes[makers[handed_over]].append((handed_over, rank))
    answers = {work: tuple(makes.get(work._replace(kind=Kind.F), ())) for work in makers.values() if work.kind.sends_gradient}
    return Wiring(_frozen(takes), _frozen(makes), answers)


def _frozen(table: Mapping[Pass, Sequence[tuple[Message, int]]]) -> dict[Pass, Ends]:
    return {work: tuple(ends) for work, ends in table.items()}


def _flow(kind: Kind) -> Flow | None:
    """What a pass of a kind makes for another stage."""
    if kind is Kind.F:
        return Flow.ACTIVATION
    return Flow.GRADIENT if kind.sends_gradient else None
