"""The handles that autograd holds in place of the tensors that it saved, while their memory is moved."""

from __future__ import annotations

from typing import Any

import torch

from megatron.pipeline.monitor.memory import hold


class Block:
    """One storage. An object that holds this keeps the storage's memory on the device, while it is there."""

    __slots__ = ("__weakref__", "_bytes", "held", "nbytes", "start")

    def __init__(self, tensor: torch.Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._bytes: torch.Tensor | None = whole
        self.held: list[Any] = hold([whole])  # counts the bytes on the device
        self.nbytes = whole.numel()
        self.start = 0  # in the arena

    @property
    def is_whole(self) -> bool:
        """Tell whether the storage still has its size: upstream's ``CheckpointWithoutOutput`` empties storages that it makes
        again.
        """
        return self._bytes is not None and self._bytes.untyped_storage().nbytes() == self.nbytes

    @property
    def is_away(self) -> bool:
        return self._bytes is None

    def leave(self) -> None:
        self._bytes = None
        self.held = []

    def arrive(self, where: torch.Tensor) -> None:
        self._bytes = where

    def there(self) -> torch.Tensor:
        """The bytes on the device."""
        assert self._bytes is not None, "a backward reads activations that are away: they must be reloaded before it"
        return self._bytes


class OffloadedView:
    """The handle of a tensor whose storage moves."""

    __slots__ = ("__weakref__", "_dtype", "_geometry", "_stale", "_tensor", "_version", "block")

    def __init__(self, tensor: torch.Tensor, block: Block) -> None:
        self.block = block
        # Without its graph, or a node that saves its own output would keep itself alive.
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = tensor._version
        self._stale = False
        self._dtype = tensor.dtype
        self._geometry = tensor.storage_offset(), tensor.size(), tensor.stride()

    def leave(self) -> None:
        """The storage has been copied. If the tensor has changed by now, the copy may have the change."""
        assert self._tensor is not None
        self._stale = self._tensor._version != self._version
        self._tensor = None

    def unpack(self) -> torch.Tensor:
        """Raises: RuntimeError: as autograd's own, if the tensor was changed in place before its copy ended."""
        if self._tensor is not None:
            return _unchanged(self._tensor, self._version)
        if self._stale:
            raise _changed(self._geometry[1])
        there = self.block.there()
        return torch.empty(0, dtype=self._dtype, device=there.device).set_(there.untyped_storage(), *self._geometry)


class KeptOnDevice:
    """The handle of a tensor that is not moved; it is counted while autograd holds this."""

    __slots__ = ("_held", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version
        self._held = hold([tensor]) if _has_memory(tensor) else []

    def unpack(self) -> torch.Tensor:
        return _unchanged(self._tensor, self._version)


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """With hooks, autograd leaves this check to them."""
    if tensor._version != version:
        raise _changed(tensor.shape)
    return tensor


def _changed(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
        f"{list(shape)}, after it was saved for backward; torch.autograd.set_detect_anomaly(True) finds the operation"
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether there is one storage to count: sparse tensors and subclasses that wrap others have none of their own."""
    try:
        tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return False
    return True
