"""Offloading on one rank: copy streams and host memory for all iterations, and the stores of each iteration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megatron.pipeline.planner import Kind, Pass, ops
from megatron.pipeline.runtime.offload.activations import Store
from megatron.pipeline.runtime.offload.copy_streams import CopyStreams, copy_streams_for
from megatron.pipeline.runtime.offload.host_memory import HostPool

SMALLEST = 64 * 2**10  # bytes; starting to copy less takes the host longer than the copy


@dataclass(frozen=True)
class CopySettings:
    """Settings of offloading.

    Attributes:
        host_limit: the most host memory that a rank may take, in bytes; None for any amount.
        smallest: bytes below which a storage stays on the device.
        bandwidth: bytes a second of each direction that a CPU imitates; None for as fast as it copies.
    """

    host_limit: int | None = None
    smallest: int = SMALLEST
    bandwidth: float | None = None


class Offloading:
    """The copy streams and the host memory of one rank, made when they are first needed, and kept."""

    def __init__(self, settings: CopySettings, device: torch.device) -> None:
        self.settings = settings
        self._device = device

    @cached_property
    def copy_streams(self) -> CopyStreams:
        return copy_streams_for(self._device, self.settings.bandwidth)

    @cached_property
    def pool(self) -> HostPool:
        return HostPool(self.settings.host_limit, pinned=self._device.type == "cuda")


class InFlight:
    """The stores of one iteration, by microbatch and chunk, and the copies that its program starts and waits for.

    Args:
        staying: tensors that stay on the device, such as parameters and buffers.
    """

    def __init__(self, offloading: Offloading, program: ops.Program, staying: Iterable[torch.Tensor]) -> None:
        self._offloading = offloading
        self._staying = frozenset(one.untyped_storage().data_ptr() for one in staying)
        self._moved = {one.work[1:3] for one in program if isinstance(one, ops.Copy)}
        self._stores: dict[tuple[int, int], Store] = {}
        self._ended: dict[tuple[int, int], Store] = {}

    def capturing(self, work: Pass, keeps_graph: bool) -> AbstractContextManager[None]:
        """The context of a forward. A forward that will be recomputed keeps only its inputs."""
        if work[1:3] not in self._moved:
            return nullcontext()
        pool, settings = self._offloading.pool, self._offloading.settings
        store = Store(self._offloading.copy_streams, pool, self._staying, settings.smallest)
        self._stores[work[1:3]] = store
        return store.capture() if keeps_graph else nullcontext()

    def adopt(self, work: Pass, tensors: Iterable[torch.Tensor | None]) -> None:
        """Also move tensors that are kept between a forward and its backward."""
        if work[1:3] in self._stores:
            self._stores[work[1:3]].adopt(tensors)

    def start(self, copy: Pass) -> None:
        """Raises: RuntimeError: there is not enough host memory."""
        store = self._stores[copy[1:3]]
        store.start_offload() if copy.kind is Kind.D2H else store.start_reload()

    def finish(self, copy: Pass) -> None:
        if copy.kind is Kind.D2H:
            self._stores[copy[1:3]].finish_offload()
        else:
            store = self._ended[copy[1:3]] = self._stores.pop(copy[1:3])
            store.finish_reload()

    def abandon(self) -> None:
        for store in self._stores.values():
            store.abandon()
        self._stores.clear()

    def copies(self) -> Iterator[tuple[Pass, Any, Any]]:
        """The copies of an iteration that has ended, with the marks of their start and end."""
        for (microbatch, chunk), store in self._ended.items():
            for kind, (start, end) in zip((Kind.D2H, Kind.H2D), store.copies, strict=False):
                yield Pass(kind, microbatch, chunk), start, end
