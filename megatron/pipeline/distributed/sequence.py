"""Collectives of sequence parallelism along the first dimension, started without waiting for them."""

from __future__ import annotations

from typing import Protocol

import torch


class Waitable(Protocol):
    """Operation that is under way until it has been waited for."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        pass


Started = tuple[torch.Tensor, Waitable]  # the tensor is there once the second has been waited for


def gather(part: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> Started:
    """The parts of all ranks of a group, one after another: [n, ...] to [n * size, ...]; without a group, the part itself."""
    if group is None:
        return part, _Done()
    whole = part.new_empty((part.size(0) * group.size(), *part.shape[1:]))
    return whole, torch.distributed.all_gather_into_tensor(whole, part.contiguous(), group=group, async_op=True)


class Part:
    """A tensor that is needed whole later, [n * size, ...], of which this rank keeps its part of a group's, [n, ...], until then;
    without a group, the whole."""

    def __init__(self, kept: torch.Tensor, group: torch.distributed.ProcessGroup | None = None) -> None:
        self.kept, self._group = kept, group
        self._started: Started | None = None

    @classmethod
    def of(cls, whole: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> Part:
        """Keep a copy of this rank's part, so that the whole can be let go of."""
        return cls(whole if group is None else whole.chunk(group.size())[group.rank()].clone(), group)

    def prefetch(self) -> None:
        """Start gathering the whole."""
        self._started = self._started or gather(self.kept, self._group)

    def whole(self) -> torch.Tensor:
        """The whole, once it is there."""
        whole, gathering = self._started or gather(self.kept, self._group)
        gathering.wait()
        return whole


def reduce_scatter(whole: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> Started:
    """This rank's part of the sum over a group: [n * size, ...] to [n, ...]; without a group, the whole itself."""
    if group is None:
        return whole, _Done()
    part = whole.new_empty((whole.size(0) // group.size(), *whole.shape[1:]))
    return part, torch.distributed.reduce_scatter_tensor(part, whole.contiguous(), group=group, async_op=True)


def complete(part: torch.Tensor, group: torch.distributed.ProcessGroup | None, reduced: bool) -> torch.Tensor:
    """Add up, in place, what the ranks of a group have; ``reduced``: a ``reduce_scatter`` has done so."""
    if group is not None and group.size() > 1 and not reduced:
        torch.distributed.all_reduce(part, group=group)
    return part
