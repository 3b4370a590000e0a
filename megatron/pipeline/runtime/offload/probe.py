"""The speed of copies to host memory and back on this machine: measured alone, in both directions, and on all ranks at once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from megatron.pipeline.distributed.groups import barrier
from megatron.pipeline.planner import CopyCosts
from megatron.pipeline.runtime.offload.copy_streams import Ticket
from megatron.pipeline.runtime.offload.host_memory import Arena
from megatron.pipeline.runtime.offload.offloading import Offloading

# Copies are planned to take longer than measured, by this factor: a pass that waits for a copy costs more than some memory.
MARGIN = 1.1

_BYTES = {"cuda": 64 * 2**20, "cpu": 2**20}  # of one copy: a GPU's stream gets up to speed, a CPU's does not take long
_COPIES = 4  # in a row, of which the first does not count
_TO_HOST, _TO_DEVICE = range(2)


@dataclass(frozen=True)
class Speeds:
    """Speeds that one rank has measured, in seconds per byte: to the host and to the device.

    Attributes:
        host: the machine that the rank runs on.
        pipeline_rank: of the rank.
        alone: while only ranks with the same pipeline rank copy, in the same direction.
        both: with the other direction at the same time.
        together: with all other ranks in the same direction at the same time.
    """

    host: str
    pipeline_rank: int
    alone: Sequence[float]
    both: Sequence[float]
    together: Sequence[float]


def measure(offloading: Offloading, host: str, pipeline_rank: int, pipeline_ranks: int) -> CopyCosts:
    """Measure the costs of copies, in seconds and bytes, with a margin; the same on all ranks. Collective over the world."""
    probe = _Probe(offloading)
    alone = both = [0.0, 0.0]
    for turn in range(pipeline_ranks):
        barrier()
        if turn == pipeline_rank:
            alone = probe.copy(_TO_HOST) + probe.copy(_TO_DEVICE)
            both = probe.copy(_TO_HOST, _TO_DEVICE)
    together = []
    for way in (_TO_HOST, _TO_DEVICE):
        barrier()
        together += probe.copy(way)
    barrier()
    mine = Speeds(host, pipeline_rank, alone, both, together)
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return agreed(everyone)


def agreed(everyone: Sequence[Speeds]) -> CopyCosts:
    """One number for each cost: medians over the ranks.

    Ranks on one machine count as behind one switch where every machine has the same number of neighbouring pipeline ranks.
    Elsewhere copies are taken to be as slow as with all ranks at once.
    """

    def share(ratios: list[float], least: float) -> float:
        return min(1.0, max(least, statistics.median(ratios)))

    def ratios(field: str) -> list[float]:
        pairs = [pair for one in everyone for pair in zip(one.alone, getattr(one, field), strict=True)]
        return [before / with_others if with_others else 1.0 for before, with_others in pairs]

    switch = _behind_one_switch(everyone)
    fields = "alone" if switch else "together"
    to_host, to_device = (statistics.median(getattr(one, fields)[way] for one in everyone) for way in (0, 1))
    return CopyCosts(
        to_host=to_host * MARGIN,
        to_device=to_device * MARGIN,
        both=share(ratios("both"), 0.5),
        switch=switch or 1,
        shared=share(ratios("together"), 1 / switch) if switch else 1.0,
    )


def _behind_one_switch(everyone: Sequence[Speeds]) -> int | None:
    """Number of pipeline ranks behind one PCIe switch: those of each machine, if they are neighbours and as many everywhere."""
    by_host: dict[str, set[int]] = {}
    for one in everyone:
        by_host.setdefault(one.host, set()).add(one.pipeline_rank)
    count = len(next(iter(by_host.values())))
    alike = all(len(ranks) == count and len({rank // count for rank in ranks}) == 1 for ranks in by_host.values())
    return count if alike else None


class _Probe:
    """Copies of fixed size, in memory of their own: a limit is for activations."""

    def __init__(self, offloading: Offloading) -> None:
        self._streams = offloading.copy_streams
        device = self._streams.device
        self._size = _BYTES[device.type]
        self._device = [torch.zeros(self._size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._host = [Arena(self._size, pinned=device.type == "cuda") for _ in range(2)]

    def copy(self, *ways: int) -> list[float]:
        """Seconds per byte, each way, while all of these are under way."""
        rounds = [[self._start(way) for way in ways] for _ in range(_COPIES)]
        for ticket in chain.from_iterable(rounds):
            ticket.wait()
        if self._streams.device.type == "cuda":
            torch.cuda.synchronize(self._streams.device)
        return [statistics.median(map(_duration, tickets)) / self._size for tickets in zip(*rounds[1:], strict=True)]

    def _start(self, way: int) -> Ticket:
        device, host = self._device[way], self._host[way].bytes
        return self._streams.to_host([(device, host)]) if way == _TO_HOST else self._streams.to_device([(host, device)])


def _duration(ticket: Ticket) -> float:
    start, end = ticket.times
    return float(start.elapsed_time(end) / 1000) if isinstance(start, torch.cuda.Event) else float(end - start)
