"""Activation memory of a rank: bytes saved for backward, counted by storage as they come and go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

_observer: ContextVar[ActivationMeter | None] = ContextVar("the meter that counts activations now", default=None)


def hold(tensors: Iterable[torch.Tensor]) -> list[CountedTensor]:
    """Say that tensors outlive the pass that runs now. The meter that observes, if one does, counts them until what is returned
    here dies."""
    meter = _observer.get()
    return [] if meter is None else [meter.hold(tensor) for tensor in tensors]


def is_observed() -> bool:
    """Tell whether a meter observes."""
    return _observer.get() is not None


class ActivationMeter:
    """Counts the bytes that forwards save for their backwards, and what W's tasks keep after B.

    A storage counts once however many tensors view it, and parameters do not count. Bytes leave the count when the last
    holder lets go, which is when autograd or a task frees them: what is measured is what is held, not what was planned.

    Attributes:
        current, peak: bytes.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._holders: dict[int, int] = {}
        self._bytes: dict[int, int] = {}  # when first counted: Transformer Engine empties tensors that it is done with
        self.current = 0
        self.peak = 0

    @contextmanager
    def observing(self) -> Iterator[None]:
        """A context in which this meter counts what is given to ``hold``."""
        token = _observer.set(self)
        try:
            yield
        finally:
            _observer.reset(token)

    def saving(self) -> AbstractContextManager[None]:
        """A context in which what autograd saves is counted, until it is freed."""
        return torch.autograd.graph.saved_tensors_hooks(self.hold, lambda held: held.tensor)

    def hold(self, tensor: torch.Tensor) -> CountedTensor:
        """Count a tensor until the returned object dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # not its address: storages that are empty share one
        if key in self._parameters:
            return CountedTensor(tensor, None, key)
        if key not in self._holders:
            self._holders[key] = 0
            self._bytes[key] = storage.nbytes()
            self.current += self._bytes[key]
            self.peak = max(self.peak, self.current)
        self._holders[key] += 1
        # Without its graph: a node that saves its own output would keep itself alive where no backward ever frees it.
        return CountedTensor(tensor.detach(), self, key)

    def _release(self, key: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.current -= self._bytes.pop(key)


class CountedTensor:
    """A counted tensor; the count goes down when this object dies."""

    __slots__ = ("_key", "_meter", "tensor")

    def __init__(self, tensor: torch.Tensor, meter: ActivationMeter | None, key: int) -> None:
        self.tensor = tensor
        self._meter = meter
        self._key = key

    def __del__(self) -> None:
        if self._meter is not None:
            self._meter._release(self._key)
