"""Attention over a sequence that is shared between ranks, for layers without Transformer Engine.

Rank r of c context-parallel ranks holds chunks r and 2c-1-r of the 2c chunks that Megatron cuts a sequence into (see
``megatron.core.utils.get_batch_on_this_cp_rank``), so that every rank has the same share of a causal attention. The keys and
values of the whole sequence are gathered for one layer at a time; queries stay where they are.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from einops import rearrange
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention


class ContextParallelAttention(DotProductAttention):
    """megatron-core's local attention, which knows no context parallelism, on this rank's queries and everyone's keys.

    Keys and values of the whole sequence are saved for the backward: selective recomputation of the attention frees them.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        unaware = copy.copy(config)
        unaware.context_parallel_size = 1
        unaware.masked_softmax_fusion = False  # the fused causal kernel takes queries to begin where keys begin
        super().__init__(unaware, *args, **kwargs)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of this rank's queries.

        Args:
            query, key, value: (tokens of this rank, batch, heads or groups, channels); a value may have fewer.
            attention_mask: (batch or 1, 1, tokens of this rank, tokens of the sequence), true where there is no attention;
                the causal mask when None. Other arguments and the result are upstream's.
        """
        group = parallel_state.get_context_parallel_group()
        whole = _GatherSequence.apply(torch.cat((key, value), dim=-1), group)
        if attention_mask is None:
            attention_mask = causal_mask(query.size(0), group.rank(), group.size(), query.device)
        return super().forward(query, *whole.split((key.size(-1), value.size(-1)), dim=-1), attention_mask, *args, **kwargs)


def causal_mask(tokens: int, rank: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Mask of the keys of the whole sequence that come after a rank's queries: (1, 1, tokens, tokens * ranks), true for those."""
    chunk = tokens // 2
    first = torch.arange(chunk, device=device)
    positions = torch.cat([first + number * chunk for number in (rank, 2 * ranks - 1 - rank)])
    return (torch.arange(tokens * ranks, device=device) > positions[:, None])[None, None]


class _GatherSequence(torch.autograd.Function):
    """From this rank's two chunks to the whole sequence in its order, along the first dimension; back, a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = local.new_empty((group.size() * local.size(0), *local.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        front, back = rearrange(gathered, "(rank half token) ... -> half rank token ...", rank=group.size(), half=2)
        return rearrange(torch.cat([front, back.flip(0)]), "chunk token ... -> (chunk token) ...")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        front, back = rearrange(gradient, "(half rank token) ... -> half rank token ...", rank=ctx.group.size(), half=2)
        by_rank = rearrange(torch.stack([front, back.flip(0)], dim=1), "rank half token ... -> rank (half token) ...")
        local = torch.empty_like(by_rank[0])
        torch.distributed.reduce_scatter_tensor(local, by_rank.flatten(0, 1), group=ctx.group)
        return local, None
