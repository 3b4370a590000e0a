"""An exact copy of what an optimizer step overwrites, from which the step can be rolled back."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Any

import torch

from megatron.pipeline.runtime.offload.host_memory import PAGE, Arena

_ALIGNMENT = 512  # bytes; of torch's allocator
_PURPOSE = ("copies of the optimizer's state", "or keep them on the device: --post-validation-copy device")


class Keep(StrEnum):
    """Place where copies are kept."""

    DEVICE = "device"  # copied when the step is taken, freed when it is accepted
    HOST = "host"  # copied while the backwards before the step run, into pinned memory that stays allocated


class Snapshot:
    """Copies of the optimizer's parameters, all of its state, and the numbers in its parameter groups.

    With copies a roll-back is exact for any optimizer. For Adam in float32 they take 12 bytes a parameter, of which 4 are the
    parameter itself.

    Parameters of 16 bits are rounded from the optimizer's own and need no copy.

    Args:
        optimizers: torch's, or any with the same ``param_groups`` and ``state``.
        keep: where copies are kept.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], keep: Keep = Keep.DEVICE) -> None:
        self._optimizers = optimizers
        self._keep = keep
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # what is copied, and its copy
        self._state: list[tuple[Any, Any, dict[str, Any] | None]] = []  # optimizer, parameter, and what it had but for tensors
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._arena: Arena | None = None  # pinned, for all copies on the host: stays until they need another size
        self._stream = torch.cuda.Stream() if keep is Keep.HOST and torch.cuda.is_available() else None
        self._copied: torch.cuda.Event | None = None

    @property
    def taken(self) -> bool:
        """Tell whether there is a copy to go back to."""
        return bool(self._groups)

    @property
    def bytes(self) -> int:
        """Bytes that the copies take now."""
        return sum(copy.numel() * copy.element_size() for _, copy in self._copies)

    def take(self) -> None:
        """Copy. What is copied must not change until ``ready`` has been called."""
        self.release()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        tensors: list[torch.Tensor] = []
        with torch.cuda.stream(self._stream):
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        tensors += [parameter.data, *self._keep_state(optimizer, parameter)]
            copies = zip(tensors, self._places(tensors), strict=True)
            self._copies = [(tensor, place.copy_(tensor, non_blocking=True)) for tensor, place in copies]
            if self._arena is not None:
                self._arena.end_use()
        if self._stream is not None:
            self._copied = self._stream.record_event()
        self._note_numbers()

    def take_early(self) -> None:
        """Copy now, while the backwards before the next step run, if copies are kept on the host."""
        if self._keep is Keep.HOST:
            self.take()

    def ready(self) -> None:
        """From here on, in the current stream, what has been copied may change. Learning rates may have until now."""
        if self.taken:
            self._note_numbers()
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    @torch.no_grad()
    def restore(self) -> None:
        """Make everything as it was when it was copied. The host may be ahead: the next ``take`` waits for the stream of this one
        before it writes to pinned copies again."""
        for tensor, copy in self._copies:
            tensor.copy_(copy, non_blocking=True)
        for optimizer, parameter, before in self._state:
            if before is None:
                optimizer.state.pop(parameter, None)
                continue
            _make(optimizer.state[parameter], before)
        for group, before in self._groups:
            _make(group, before | {"params": group["params"]})
        if self._arena is not None:
            self._arena.end_use()  # it is unpinned, where the copies need another size, only once this has been read

    def release(self) -> None:
        """Let go of the copies."""
        self._copies, self._state, self._groups, self._copied = [], [], [], None

    def _note_numbers(self) -> None:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        self._groups = [(group, {name: _own(value) for name, value in group.items() if name != "params"}) for group in groups]

    def _places(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Uninitialised tensors for copies: those of a GPU's tensors kept on the host side by side in one pinned arena."""
        if self._stream is None:
            return [torch.empty_like(tensor) for tensor in tensors]
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT if tensor.is_cuda else 0 for tensor in tensors]
        starts = [0, *accumulate(sizes)]
        if self._arena is None or not 0 <= self._arena.size - starts[-1] < PAGE:
            self._arena = None  # before there is another one
            self._arena = Arena(starts[-1], pinned=True, purpose=_PURPOSE)
        self._arena.begin_use()
        memory = self._arena.bytes
        return [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape) if size else torch.empty_like(tensor)
            for tensor, start, size in zip(tensors, starts, sizes, strict=False)
        ]

    def _keep_state(self, optimizer: Any, parameter: torch.Tensor) -> list[torch.Tensor]:
        """Note what the optimizer has of a parameter; returns the tensors among it."""
        if parameter not in optimizer.state:  # most optimizers make it when they first step
            self._state.append((optimizer, parameter, None))
            return []
        before = dict(optimizer.state[parameter])
        self._state.append((optimizer, parameter, before))
        return [value for value in before.values() if isinstance(value, torch.Tensor)]


def _make(state: dict[str, Any], before: dict[str, Any]) -> None:
    """Give a dict back what it had, in place."""
    for name in state.keys() - before.keys():
        del state[name]
    state.update(before)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
