"""Brings what the loss function reported from the rank with the last stage to the last rank, where Megatron-LM looks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron.pipeline.dist.device import this_device
from megatron.pipeline.schedule.core.placement import Placement


class LastRank:
    """The first iteration tells all ranks what is reported; those like it send numbers alone, for which no rank waits before it
    needs them."""

    def __init__(self, placement: Placement) -> None:
        self._home, self._last = placement.home(placement.last_stage)[0], placement.ranks - 1
        self._like: dict[int, tuple[list[torch.Tensor], Any]] = {}  # by number of microbatches
        self._sent: Any = None  # what may still be on its way, and its memory

    def send(self, reports: list[Any], microbatches: int | None) -> Callable[[], object]:
        """Send; on the last rank the reports are in the list once the function that is returned has been called.

        Args:
            reports: empty but on the rank with the last stage.
            microbatches: None for iterations that may report something else each time.
        """
        if self._home == self._last:
            return bool
        group, further = parallel_state.get_pipeline_model_parallel_group(), MTPLossLoggingHelper.tracker
        mine = reports, further.get("values")  # losses of multi-token prediction, which upstream logs from there
        source = torch.distributed.get_global_rank(group, self._home)

        def arrived(found: Any) -> None:
            if group.rank() != self._last:
                return
            received, values = tree_map(_to_device, found)
            reports[:] = received
            if values is not None:
                replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
                further.update(values=values, reduce_group=None, avg_group=replicas)

        if microbatches not in self._like:
            sent = [tree_map(_to_cpu, mine) if group.rank() == self._home else None]
            torch.distributed.broadcast_object_list(sent, src=source, group=group)
            leaves, shape = tree_flatten(sent[0])
            if microbatches is not None and all(map(torch.is_tensor, leaves)):
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


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if torch.is_tensor(value) else value


def _to_device(value: Any) -> Any:
    return value.to(this_device()) if torch.is_tensor(value) else value
