"""Brings what the loss function reported from the rank with the last stage to the last rank, where loops look for it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.planner.schedule.core.placement import Placement


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
    """The first report tells what is reported; those like it send numbers alone."""

    def __init__(self, placement: Placement) -> None:
        self._home, self._last = placement.home(placement.last_stage)[0], placement.ranks - 1
        self._like: dict[int, tuple[list[torch.Tensor], Any]] = {}  # by number of microbatches
        self._sent: Any = None  # what may still be on its way, and its memory
        self._template: Any = None  # of the last ``bring``, with ``_Like`` for tensors; pickled, on the rank that sends

    def send(self, reports: list[Any], microbatches: int) -> Callable[[], object]:
        """Send what has the same form in every iteration of that many microbatches; no rank waits before it needs it.

        Args:
            reports: empty but on the rank with the last stage.

        Returns:
            on the last rank the reports are in the list once this has been called.
        """
        if self._home == self._last:
            return bool
        group, mine = parallel_state.get_pipeline_model_parallel_group(), _with_further(reports)
        source = torch.distributed.get_global_rank(group, self._home)

        def arrived(found: Any) -> None:
            if group.rank() == self._last:
                _put(reports, found)

        if microbatches not in self._like:
            sent = [tree_map(_to_cpu, mine) if group.rank() == self._home else None]
            torch.distributed.broadcast_object_list(sent, src=source, group=group)
            leaves, shape = tree_flatten(sent[0])
            if all(map(torch.is_tensor, leaves)):
                self._like[microbatches] = leaves, shape
            return lambda: arrived(sent[0])
        leaves, shape = self._like[microbatches]
        if group.rank() == self._home:
            numbers = torch.cat([leaf.detach().reshape(-1).double() for leaf in tree_flatten(mine)[0]])
        else:
            numbers = torch.empty(sum(leaf.numel() for leaf in leaves), dtype=torch.float64, device=this_device())
        if self._sent:
            self._sent[0].wait()
        self._sent = torch.distributed.broadcast(numbers, src=source, group=group, async_op=True), numbers

        def arrive() -> None:
            if group.rank() == self._last:
                self._sent[0].wait()
                parts = numbers.split([leaf.numel() for leaf in leaves])
                alike = [part.view(leaf.shape).to(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
                arrived(tree_unflatten(alike, shape))

        return arrive

    def bring(self, reports: list[Any], group: torch.distributed.ProcessGroup) -> None:
        """Send what may have another form each time, tensors with their bits; the last rank waits for it, others take no part.
        Nested tensors come, too, if their layout is ``torch.jagged``.

        Args:
            reports: empty but on the rank with the last stage; filled on the last rank.
            group: the pipeline's ranks.
        """
        if self._home == self._last:
            return
        if group.rank() == self._home:
            mine = tree_map(_apart, _with_further(reports))
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


def _with_further(reports: list[Any]) -> tuple[list[Any], torch.Tensor | None]:
    """Reports, and losses of multi-token prediction, which upstream logs from there."""
    return list(reports), MTPLossLoggingHelper.tracker.get("values")


def _put(reports: list[Any], found: Any) -> None:
    reports[:], values = tree_map(_to_device, found)
    if values is not None:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        MTPLossLoggingHelper.tracker.update(values=values, reduce_group=None, avg_group=replicas)


def _apart(leaf: Any) -> Any:
    return _Jagged(leaf.values(), leaf.offsets()) if torch.is_tensor(leaf) and leaf.is_nested else leaf  # type: ignore[attr-defined]


def _joined(leaf: Any) -> Any:
    return torch.nested.nested_tensor_from_jagged(*leaf) if isinstance(leaf, _Jagged) else leaf


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if torch.is_tensor(value) else value


def _to_device(value: Any) -> Any:
    return value.to(this_device()) if torch.is_tensor(value) else value
