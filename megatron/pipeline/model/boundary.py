"""The gradients of weights that the first and the last stage share, and the number of tokens, under any placement.

megatron-core assumes that the first stage is on the first rank and the last stage on the last rank. ``BoundaryModules`` reads
both ranks from the placement. If one rank has both stages (a V placement), it adds the two copies up and sends nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import compat
from megatron.pipeline.patches.loops import finalize_upstream

from megatron.pipeline.distributed.groups import new_group
from megatron.pipeline.model.adapter import adapter_of, has_adapter
from megatron.pipeline.planner import Placement

__all__ = ["BoundaryModules"]


class BoundaryModules:
    """The modules that only the first or the last stage has, as one rank of a pipeline sees them.

    Args:
        placement: which rank has which stage.

    Making one is collective over the world.
    """

    def __init__(self, placement: Placement) -> None:
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        self._homes = placement.home(0), placement.home(placement.last_stage)
        self._rank = self._pipeline.rank()
        ranks = sorted({torch.distributed.get_global_rank(self._pipeline, rank) for rank, _ in self._homes})
        apart = len(ranks) > 1 and torch.distributed.get_rank() in ranks
        self._group = new_group(ranks if apart else [])

    def tie(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Give the output layer the weights of the embedding that it is tied to, before training; collective."""
        self._add_up([weight.data for weight in self._copies(chunks)])

    def differ(self, chunks: Sequence[torch.nn.Module]) -> bool:
        """Tell whether this rank has both copies, and they differ."""
        copies = self._copies(chunks)
        return len(copies) == 2 and not torch.equal(*copies)

    def follow_embedding(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Give the output layer the weights of the embedding that it is tied to, if this rank has both."""
        copies = self._copies(chunks)
        if len(copies) == 2:
            copies[1].data.copy_(copies[0].data)

    def finalize_model_grads(
        self,
        chunks: list[torch.nn.Module],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
    ) -> None:
        """megatron-core's function of that name, with its arguments. It calls megatron-core's for all other gradients."""
        groups = copy.copy(pg_collection or ProcessGroupCollection.use_mpu_process_groups())
        groups.embd = groups.pos_embd = SimpleNamespace(size=lambda: 1)  # where upstream would look for copies of embeddings
        finalize_upstream(chunks, None, pg_collection=groups, force_all_reduce=force_all_reduce)
        copies = self._copies(chunks)
        attribute_of = compat.get("megatron.core.distributed.finalize_model_grads", "_get_main_grad_attr")
        gradients = [getattr(weight, attribute_of(weight)) for weight in copies]
        self._add_up([gradient for gradient in gradients if gradient is not None])  # a frozen weight has none
        if num_tokens is None:
            return
        _, (last, _) = self._homes
        torch.distributed.broadcast(num_tokens, group_src=last, group=self._pipeline)
        torch.distributed.all_reduce(num_tokens, group=groups.dp_cp)
        # On the device: the host would wait for all ranks' backwards here.
        share = torch.where(num_tokens > 0, 1.0 / num_tokens.clamp(min=1), 1.0)
        for chunk in chunks:
            chunk.scale_gradients(share)  # type: ignore[operator]

    def _copies(self, chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
        """This rank's copies of a weight that the first and the last stage share, the first stage's copy first."""
        if self._homes[0] == self._homes[1]:
            return []
        homes = sorted(chunk for rank, chunk in self._homes if rank == self._rank)
        here = [chunk for chunk in homes if has_adapter(unwrap_model(chunks[chunk]))]  # others have no weights that upstream ties
        copies = [adapter_of(chunks[chunk]).shared_weight(unwrap_model(chunks[chunk])) for chunk in here]
        return [weight for weight in copies if weight is not None]

    def _add_up(self, copies: list[torch.Tensor]) -> None:
        """Replace every copy by the sum of both."""
        if len(copies) == 2:
            copies[0].add_(copies[1])
            copies[1].copy_(copies[0])
        elif copies:
            torch.distributed.all_reduce(copies[0], group=self._group)
