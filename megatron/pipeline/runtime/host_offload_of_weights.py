"""Parking: the weights, gradients and optimizer state of a rank leave the device while other ranks have their turns.

Storages move, tensors stay: every view of a buffer, such as a parameter, its gradient or a shard of the distributed optimizer,
is empty while its storage is away, and has its values again once it is back. Values are copied, so no number changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

_MIB = 2**20


class DoesNotFit(RuntimeError):
    """Error: one rank needs more in its turn than the device has."""


class HostOffloadOfWeights:
    """Moves the storages of tensors to host memory and back.

    Args:
        tensors: what moves, asked every time that it leaves: optimizers make their state in their first step.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._tensors = tensors
        self._hosts: dict[int, torch.UntypedStorage] = {}  # by storage; pinned once
        self._away: dict[int, tuple[torch.UntypedStorage, int]] = {}  # with their bytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor's storage is one of those that move."""
        return _key(tensor) in self._storages()

    def leave(self) -> None:
        """Move everything to host memory. What is there already stays there."""
        for name, storage in self._storages().items():
            if size := storage.nbytes():
                host = self._hosts.get(name)
                if host is None or host.nbytes() != size:
                    pinned = storage.device.type == "cuda"
                    host = self._hosts[name] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).untyped_storage()
                host.copy_(storage, non_blocking=True)
                self._away[name] = storage, size
        _synchronize()  # before the memory of a storage is freed, its copy is complete
        for storage, _ in self._away.values():
            storage.resize_(0)
        self._hosts = {name: host for name, host in self._hosts.items() if name in self._away}
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # other processes cannot take what torch keeps for this one

    def enter(self) -> None:
        """Move everything back.

        Raises:
            DoesNotFit: the device has less memory than this rank needs; says how much is missing.
        """
        needed = sum(size for _, size in self._away.values())
        free = _free()
        if free is not None and needed > free:
            raise DoesNotFit(
                f"weights, gradients and optimizer state of this rank are {needed / _MIB:,.1f} MiB, and the device has "
                f"{free / _MIB:,.1f} MiB for them besides the activations of all ranks: {(needed - free) / _MIB:,.1f} MiB are "
                "missing. Raise --pipeline-model-parallel-size or --tensor-model-parallel-size, or lower the activations by "
                "--micro-batch-size or a schedule such as v-min"
            )
        for name, (storage, size) in self._away.items():
            storage.resize_(size)
            storage.copy_(self._hosts[name], non_blocking=True)
        _synchronize()
        self._away.clear()

    def _storages(self) -> dict[int, torch.UntypedStorage]:
        return {_key(tensor): tensor.untyped_storage() for tensor in self._tensors()}


def _key(tensor: torch.Tensor) -> int:
    """Key of a tensor's storage as long as it lives, wherever its memory lies."""
    return tensor.untyped_storage()._cdata


def state_of(chunks: Sequence[torch.nn.Module], optimizer: Any) -> Iterator[torch.Tensor]:
    """Parameters, gradients and optimizer state of a rank, views of the same storage included.

    Args:
        chunks: wrapped by megatron-core's DDP, or not.
        optimizer: megatron-core's, chained or not, or one of torch's.
    """
    for chunk in chunks:
        for parameter in chunk.parameters():
            yield from _with_gradients(parameter)
        for buffer in (*getattr(chunk, "buffers", ()), *getattr(chunk, "expert_parallel_buffers", ())):
            yield from (one for one in (buffer.param_data, buffer.grad_data) if one is not None)
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", one)
        if inner is None:  # a rank without parameters for it
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield from _with_gradients(parameter)
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def _with_gradients(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    yield parameter
    for gradient in (parameter.grad, getattr(parameter, "main_grad", None), getattr(parameter, "decoupled_grad", None)):
        if gradient is not None:
            yield gradient


def _free() -> int | None:
    """Bytes that a GPU can give to this rank: its own, and what torch keeps for this process without using it; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
