"""Brings what the loss function reported from the rank with the last stage to the last rank, where loops look for it."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.planner import Placement


@dataclass(frozen=True)
class _Like:
    """In the place of a tensor: what is known of it before it comes."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Jagged(NamedTuple):
    """In the place of a nested tensor of rows of various lengths: what it is made of."""

    values: torch.Tensor
    offsets: torch.Tensor


class LastRank:
    """The way home of reports; their form is sent where it is another than before."""

    def __init__(self, placement: Placement) -> None:
        self._home, self._last = placement.home(placement.last_stage)[0], placement.ranks - 1
        self._template: Any = None  # of the last reports, with ``_Like`` for tensors; pickled, on the rank that sends

    def bring(self, reports: list[Any], group: torch.distributed.ProcessGroup) -> None:
        """Send reports, tensors with their bits; the last rank waits for them, others take no part. Nested tensors come, too, if
        their layout is ``torch.jagged``.

        Args:
            reports: empty but on the rank with the last stage; filled on the last rank.
            group: the pipeline's ranks.
        """
        if self._home == self._last:
            return
        if group.rank() == self._home:
            further = MTPLossLoggingHelper.tracker.get("values")  # losses that upstream logs from there
            mine = tree_map(_apart, (list(reports), further))
            template = tree_map(lambda leaf: _Like(leaf.shape, leaf.dtype) if torch.is_tensor(leaf) else leaf, mine)
            described = pickle.dumps(template)
            words, self._template = b"" if described == self._template else described, described
            tensors = [leaf.detach() for leaf in tree_flatten(mine)[0] if torch.is_tensor(leaf)]
            flat = [one.to(this_device()).contiguous().reshape(-1).view(torch.uint8) for one in tensors if one.numel()]
            to = torch.distributed.get_global_rank(group, self._last)
            form = [torch.frombuffer(bytearray(words), dtype=torch.uint8)] if words else []
            for part in (torch.tensor([len(words)]), *form, *([torch.cat(flat)] if flat else [])):
                torch.distributed.send(part.to(this_device()), to, group=group)
        elif group.rank() == self._last:
            source = torch.distributed.get_global_rank(group, self._home)

            def receive(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
                buffer = torch.empty(count, dtype=dtype, device=this_device())
                if count:
                    torch.distributed.recv(buffer, source, group=group)
                return buffer

            if length := int(receive(1, torch.int64)):
                self._template = pickle.loads(bytes(receive(length).tolist()))
            leaves, shape = tree_flatten(self._template)
            sizes = [leaf.bytes if isinstance(leaf, _Like) else 0 for leaf in leaves]
            parts = receive(sum(sizes)).split(sizes)
            filled = [
                part.clone().view(leaf.dtype).view(leaf.shape) if isinstance(leaf, _Like) else leaf
                for part, leaf in zip(parts, leaves, strict=True)
            ]
            brought = tree_unflatten(filled, shape)
            _put(reports, tree_map(_joined, brought, is_leaf=lambda one: isinstance(one, _Jagged)))


def _put(reports: list[Any], found: Any) -> None:
    reports[:], values = found
    if values is not None:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        MTPLossLoggingHelper.tracker.update(values=values, reduce_group=None, avg_group=replicas)


def _apart(leaf: Any) -> Any:
    return _Jagged(leaf.values(), leaf.offsets()) if torch.is_tensor(leaf) and leaf.is_nested else leaf  # type: ignore[attr-defined]


def _joined(leaf: Any) -> Any:
    return torch.nested.nested_tensor_from_jagged(*leaf) if isinstance(leaf, _Jagged) else leaf
