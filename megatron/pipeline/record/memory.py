"""How much activation memory a rank holds: bytes saved for backward, counted by storage as they come and go."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch


class ActivationMeter:
    """Counts the bytes that forwards save for their backwards, and what W's tasks keep after B.

    A storage counts once however many tensors view it, and parameters do not count. Bytes leave the count when the last
    holder lets go, which is when autograd or a task frees them: what is measured is what is held, not what was planned.

    Attributes:
        current, peak: bytes.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._holders: dict[int, int] = {}
        self.current = 0
        self.peak = 0

    def saving(self) -> AbstractContextManager[None]:
        """A context in which what autograd saves is counted, until it is freed."""
        return torch.autograd.graph.saved_tensors_hooks(self.hold, _unpack)

    def hold(self, tensor: torch.Tensor) -> Held:
        """Count a tensor until the returned object dies."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self._parameters:
            return Held(tensor, None, key)
        if key not in self._holders:
            self._holders[key] = 0
            self.current += storage.nbytes()
            self.peak = max(self.peak, self.current)
        self._holders[key] += 1
        # Without its graph: a node that saves its own output would keep itself alive where no backward ever frees it.
        return Held(tensor.detach(), self, key)

    def _release(self, tensor: torch.Tensor, key: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.current -= tensor.untyped_storage().nbytes()


class Held:
    """A counted tensor; the count goes down when this object dies."""

    __slots__ = ("_key", "_meter", "tensor")

    def __init__(self, tensor: torch.Tensor, meter: ActivationMeter | None, key: int) -> None:
        self.tensor = tensor
        self._meter = meter
        self._key = key

    def __del__(self) -> None:
        if self._meter is not None:
            self._meter._release(self.tensor, self._key)


def _unpack(held: Held) -> torch.Tensor:
    return held.tensor
