"""The activations of one microbatch on one chunk between forward and backward, and their copies to host memory and back."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Set
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

import torch

from megatron.pipeline.monitor.memory import hold
from megatron.pipeline.runtime.offload.copy_streams import CopyStreams, Ticket
from megatron.pipeline.runtime.offload.handles import Block, KeptOnDevice, OffloadedView
from megatron.pipeline.runtime.offload.host_memory import Arena, HostPool

_ALIGNMENT = 512  # bytes, of every storage in an arena


class _Location(Enum):
    """Place of the activations of a store."""

    HERE = "on the device"
    LEAVING = "on their way to host memory"
    AWAY = "in host memory"
    RETURNING = "on their way back"
    BACK = "on the device again"
    GIVEN_UP = "given up"


class Store:
    """The activations of one microbatch on one chunk, in one iteration.

    A storage moves as a whole and once, however many tensors view it, and all storages lie in one arena. The methods are called
    in this order, ``capture`` and ``adopt`` any number of times; where nothing is to be moved, they do nothing.

    Autograd holds handles instead of tensors. They alone keep the memory, before it leaves and after it is back: a tensor that
    a forward drops is not copied, and one that a backward frees is freed.

    Args:
        streams, pool: of this rank, for all stores.
        parameters: addresses of the storages that stay on the device in any case: those of parameters and buffers.
        smallest: bytes below which a storage is left alone.

    Attributes:
        bytes: that move, once ``start_offload`` has been called.
    """

    def __init__(self, streams: CopyStreams, pool: HostPool, parameters: Set[int], smallest: int) -> None:
        self._streams = streams
        self._pool = pool
        self._parameters = parameters
        self._smallest = smallest
        self._where = _Location.HERE
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()  # by address, while here
        self._views: list[weakref.ref[OffloadedView]] = []
        self._adopted: list[tuple[torch.Tensor, OffloadedView]] = []
        self._moving: list[Block] = []  # kept alive for the copy that reads or writes them
        self._arriving: list[torch.Tensor] = []
        self._arena: Arena | None = None
        self._tickets: list[Ticket] = []
        self.bytes = 0

    @property
    def copies(self) -> tuple[tuple[Any, Any], ...]:
        """Start and end of the copy to the host and of the one back, as far as they have been started (see ``Ticket.times``).
        On a CPU this waits for their end."""
        return tuple(ticket.times for ticket in self._tickets)

    def capture(self) -> AbstractContextManager[None]:
        """A context for a forward: autograd then saves handles instead of tensors."""
        self._expect(_Location.HERE)
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.unpack())

    def adopt(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Also move tensors that the caller keeps, such as a stage's inputs: leaves of a graph.

        While offloaded they have their shape but no memory. Once they are back they are counted until they die.
        """
        self._expect(_Location.HERE)
        for tensor in tensors:
            if tensor is not None and self._moves(tensor):
                self._adopted.append((tensor, self._view(tensor)))

    def start_offload(self) -> None:
        """Start copying the activations to host memory.

        Raises:
            RuntimeError: there is not enough host memory.
        """
        self._expect(_Location.HERE)
        # A storage that has been emptied since it was saved is filled again before backward reads it, and does not move.
        blocks = [block for block in self._blocks.values() if block.is_whole]
        total = 0
        for block in blocks:
            block.start = total
            total += -(-block.nbytes // _ALIGNMENT) * _ALIGNMENT
        if blocks:
            self._arena = self._pool.take(total)
            self._tickets.append(self._streams.to_host([(block.there(), self._in_arena(block)) for block in blocks]))
        self.bytes = sum(block.nbytes for block in blocks)
        self._moving = blocks
        self._where = _Location.LEAVING

    def finish_offload(self) -> None:
        """Wait for the copy and free the memory on the device."""
        self._expect(_Location.LEAVING)
        if self._moving:
            self._tickets[-1].wait()
        leaving = set(self._moving)
        for reference in self._views:
            view = reference()
            if view is not None and view.block in leaving:
                view.leave()
        self._adopted = [(tensor, view) for tensor, view in self._adopted if view.block in leaving]
        for tensor, _ in self._adopted:
            tensor.data = torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        for block in self._moving:
            block.leave()
        self._moving = []
        self._where = _Location.AWAY

    def start_reload(self) -> None:
        """Allocate memory on the device for what is still needed, and start copying back."""
        self._expect(_Location.AWAY)
        self._moving = [block for block in self._blocks.values() if block.is_away]
        self._arriving = [_blank(block.nbytes, self._streams.device) for block in self._moving]
        if self._moving:
            sources = [self._in_arena(block) for block in self._moving]
            self._tickets.append(self._streams.to_device(list(zip(sources, self._arriving, strict=True))))
        for block, arriving in zip(self._moving, self._arriving, strict=True):
            block.held = hold([arriving])
        self._where = _Location.RETURNING

    def finish_reload(self) -> None:
        """Wait for the copy; the backward may run from here on. The store keeps nothing."""
        self._expect(_Location.RETURNING)
        if self._moving:
            self._tickets[-1].wait()
        for block, arriving in zip(self._moving, self._arriving, strict=True):
            block.arrive(arriving)
        for tensor, view in self._adopted:
            tensor.data = view.unpack()
            tensor.offloaded_block = view.block  # type: ignore[attr-defined]  # counted for as long as the tensor lives
        self._drop()
        self._where = _Location.BACK

    def abandon(self) -> None:
        """Give up the iteration, at any moment: wait for copies under way and return the host memory."""
        try:
            if self._moving:
                self._tickets[-1].wait()
        finally:
            self._drop()
            self._where = _Location.GIVEN_UP

    def _expect(self, where: _Location) -> None:
        assert self._where is where, f"activations are {self._where.value}, and should be {where.value}"

    def _drop(self) -> None:
        if self._arena is not None:
            self._pool.give(self._arena)
        self._arena = None
        self._views, self._adopted, self._moving, self._arriving = [], [], [], []

    def _in_arena(self, block: Block) -> torch.Tensor:
        assert self._arena is not None
        return self._arena.bytes[block.start : block.start + block.nbytes]

    def _pack(self, tensor: torch.Tensor) -> KeptOnDevice | OffloadedView:
        return self._view(tensor) if self._moves(tensor) else KeptOnDevice(tensor)

    def _moves(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device != self._streams.device:
            return False
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= max(self._smallest, 1) and storage.data_ptr() not in self._parameters

    def _view(self, tensor: torch.Tensor) -> OffloadedView:
        address = tensor.untyped_storage().data_ptr()
        block = self._blocks.get(address)
        if block is None:
            block = self._blocks[address] = Block(tensor)
        view = OffloadedView(tensor, block)
        self._views.append(weakref.ref(view))
        return view


def _blank(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
