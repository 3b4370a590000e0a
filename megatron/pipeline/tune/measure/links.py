"""Time of messages and collectives between the ranks that measure: neighbours within a node, all of a node, and two nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron.pipeline.distributed.groups import new_group
from megatron.pipeline.planner.costmodel.device import Link
from megatron.pipeline.tune.measure.clock import MeasureClock, seconds
from megatron.pipeline.tune.measure.fit import SendingFit, link

_SIZES = {"cuda": (2**12, 2**20, 2**26), "cpu": (2**12, 2**18, 2**22)}  # bytes: latency shows in the first, bandwidth in the last
_TYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
_CHAIN = 4  # in a row, so that starting one hides behind another where there is anything to hide behind


def nodes(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of every host, in the order in which hosts first appear."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())


def partners(index: int, count: int) -> list[int | None]:
    """Partners of a rank in a pairwise exchange: while 0 talks with 1, 2 with 3, ..., and then while 1 talks with 2, ...

    Always two turns, so that rows of different lengths take them together; None in one in which it is left over.
    """
    others = [index + 1 if index % 2 == first else index - 1 for first in (0, 1)]
    return [other if 0 <= other < count else None for other in others]


def measure_links(hosts: Sequence[str], device: torch.device, iterations: int, tell: Callable[[str], object]) -> dict[str, Link]:
    """The links of a ``Device`` that these ranks have, by name; the same on all of them. Collective over the world.

    ``hop`` and ``between`` are for messages both ways at once, as 1F1B sends them, between all neighbours of a node and between
    equal places of two nodes. ``within`` is for all-gathers and reduce-scatters of a node, of all nodes at once. The slowest
    rank counts.

    Args:
        hosts: of every rank.
    """
    probe = _LinkProbe(device, iterations)
    rank, where = torch.distributed.get_rank(), nodes(hosts)
    node = next(number for number, ranks in enumerate(where) if rank in ranks)
    mine = where[node]
    place = mine.index(rank)
    group = None if len(where) == 1 else new_group(mine)
    for size in _SIZES[device.type]:
        tell(f"links: {size} bytes")
        for other in partners(place, len(mine)):
            probe.exchange("hop", None if other is None else mine[other], size)
        for other in partners(node, len(where)):
            there = [] if other is None else where[other]
            probe.exchange("between", there[place] if place < len(there) else None, size)
        probe.collectives("within", group, len(mine), size)
    return probe.links()


class _LinkProbe:
    """Times messages of this rank, by the name of their link."""

    def __init__(self, device: torch.device, iterations: int) -> None:
        self._device, self._iterations = device, iterations
        self._clock = MeasureClock(device)
        self._sent: list[tuple[str, str, SendingFit]] = []
        # NCCL makes the world's communicator here, with everyone present: messages between two of its ranks then use that.
        together(device)

    def exchange(self, name: str, peer: int | None, size: int) -> None:
        """A message each way between this rank and another one, if there is one. Collective over the world."""
        outgoing, incoming = (torch.zeros(size, dtype=torch.uint8, device=self._device) for _ in range(2))

        def once() -> None:
            operations = [
                torch.distributed.P2POp(torch.distributed.isend, outgoing, peer),
                torch.distributed.P2POp(torch.distributed.irecv, incoming, peer),
            ]
            for work in torch.distributed.batch_isend_irecv(operations):
                work.wait()

        together(self._device)
        if peer is not None:
            self._sent.append((name, "exchange", SendingFit(1, size, self._seconds(once))))

    def collectives(self, name: str, group: torch.distributed.ProcessGroup | None, ranks: int, size: int) -> None:
        """An all-gather and a reduce-scatter of ``size`` bytes over a group. Collective over the world."""
        if ranks == 1:
            together(self._device)
            return
        kind = _TYPES[self._device.type]
        part = torch.zeros(max(1, size // kind.itemsize // ranks), dtype=kind, device=self._device)
        whole = part.new_zeros(part.numel() * ranks)
        actions: dict[str, Callable[[], Any]] = {
            "all-gather": lambda: torch.distributed.all_gather_into_tensor(whole, part, group=group),
            "reduce-scatter": lambda: torch.distributed.reduce_scatter_tensor(part, whole, group=group),
        }
        together(self._device)
        for what, action in actions.items():
            sent = SendingFit(ranks - 1, part.numel() * part.element_size(), self._seconds(action))
            self._sent.append((name, what, sent))

    def links(self) -> dict[str, Link]:
        """Fitted to what the slowest rank has seen. Collective over the world."""
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, self._sent)
        slowest: dict[tuple[str, str, float], SendingFit] = {}
        for name, what, sent in (one for mine in everyone for one in mine):
            key = name, what, sent.size
            slowest[key] = max(sent, slowest.get(key, sent), key=lambda one: one.seconds / one.messages)
        names = dict.fromkeys(name for name, *_ in slowest)
        return {name: link([sent for key, sent in slowest.items() if key[0] == name]) for name in names}

    def _seconds(self, once: Callable[[], object]) -> float:
        return seconds(self._clock, once, self._iterations, warm_up=1, chain=_CHAIN)


def together(device: torch.device) -> None:
    """Wait until all ranks are here, and the GPU with them."""
    torch.distributed.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
