"""Time of a message between two ranks of a pipeline, and of a collective of all of them, measured between iterations."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from megatron.pipeline.planner import Placement, kinds, ops
from megatron.pipeline.runtime.p2p import Tensors, Transport

_PINGS = 5  # that count, after one that opens the connection


def ping(transport: Transport, rank: int, placement: Placement) -> list[float]:
    """Seconds of one hop, between every two ranks that exchange messages, measured by the lower of them with whole messages
    that go there and back. Collective over the pipeline; between iterations.

    The time from a send to the end of its receive inside an iteration is no measure: it is mostly the wait for the pass.
    """
    homes = [placement.home(stage)[0] for stage in range(placement.last_stage + 1)]
    pairs = sorted({(min(pair), max(pair)) for pair in pairwise(homes) if pair[0] != pair[1]})
    seconds: list[float] = []
    for low, high in pairs:
        if rank == low:
            seconds += _ask(transport, high)
        elif rank == high:
            _answer(transport, low)
    return seconds


def ping_all(group: torch.distributed.ProcessGroup, tensor: torch.Tensor) -> list[float]:
    """Seconds of a collective of the spread vocabulary, measured by the first rank; empty on the others. Collective over the
    group; between iterations.

    The sum of all ranks' tensors goes to the first rank and comes back: these two carry hidden states in every microbatch.

    Args:
        group: the ranks of a pipeline, that of the vocabulary's collectives.
        tensor: as large as hidden states are; overwritten.
    """
    first = torch.distributed.get_process_group_ranks(group)[0]
    seconds = []
    for _ in range(1 + _PINGS):
        began = _now()
        torch.distributed.reduce(tensor, first, group=group)
        torch.distributed.broadcast(tensor, first, group=group)
        seconds.append((_now() - began) / 2)
    return seconds[1:] if torch.distributed.get_rank() == first else []


def _ask(transport: Transport, peer: int) -> list[float]:
    seconds = []
    for message, answer in zip(*_messages(), strict=True):
        began = _now()
        _send(transport, message, peer, transport.blank(message.flow))
        _receive(transport, answer, peer)  # after what it answers, as in a program that is proved to end
        transport.wait(answer)
        seconds.append((_now() - began) / 2)
        transport.finish(message, peer)
    return seconds[1:]


def _answer(transport: Transport, peer: int) -> None:
    there, back = _messages()
    _receive(transport, there[0], peer)
    for number, answer in enumerate(back):
        tensors = transport.wait(there[number])
        _send(transport, answer, peer, tensors)
        if answer is not back[-1]:
            _receive(transport, there[number + 1], peer)
        transport.finish(answer, peer)


def _messages() -> tuple[list[ops.Message], list[ops.Message]]:
    """Messages there and back, with numbers of stages that the model does not have."""
    there, back = ([ops.Message(kinds.Flow.ACTIVATION, number, stage) for number in range(1 + _PINGS)] for stage in (-1, -2))
    return there, back


def _receive(transport: Transport, message: ops.Message, peer: int) -> None:
    """Started alone: NCCL reports only the end of everything that was started together."""
    transport.receive(message, peer)
    transport.start()


def _send(transport: Transport, message: ops.Message, peer: int, tensors: Tensors) -> None:
    transport.send(message, peer, tensors, when_sent=lambda: None)
    transport.start()


def _now() -> float:
    """The time at which the current stream is done. Other streams may be waiting for what a peer sends only after our message."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()
