"""Layers in plain torch whose attention keeps packed sequences apart: ``--spec packed_layers LAYERS``, for tests on CPUs.

megatron-core's local attention refuses ``packed_seq_params``; which parts of a sequence a rank has only Transformer Engine knows.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.distributed.nn.functional import all_reduce


def parts(bounds: torch.Tensor, tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Positions of a rank: of each of the sequences between bounds, cut into 2 * ranks, two pieces of equal work."""
    ends = sorted({0, tokens, *bounds.tolist()})
    pieces = [torch.arange(begin, end).tensor_split(2 * ranks) for begin, end in pairwise(ends)]
    return torch.cat([one[place] for one in pieces for place in (rank, 2 * ranks - 1 - rank)])


class PackedAttention(DotProductAttention):
    """Causal attention within each of the sequences of [t, heads, width], some of whose tokens other ranks have."""

    def __init__(self, config: Any, *given: Any, **options: Any) -> None:
        unaware = copy.copy(config)
        unaware.context_parallel_size = 1
        super().__init__(unaware, *given, **options)

    def forward(self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any, **__: Any) -> Any:
        assert packed_seq_params is not None, "a stage does not know where sequences begin"
        group, bounds = parallel_state.get_context_parallel_group(), packed_seq_params.cu_seqlens_q
        tokens = torch.arange(len(query) * group.size())
        here = parts(bounds, len(tokens), group.size(), group.rank())
        key, value = (
            all_reduce(one.new_zeros(len(tokens), *one.shape[1:]).index_copy(0, here, one), group=group) for one in (key, value)
        )
        document = torch.bucketize(tokens, bounds[1:], right=True)
        hidden = (document[here, None] != document) | (tokens > here[:, None])
        return super().forward(query[:, None], key[:, None], value[:, None], hidden[None, None]).squeeze(1)


gpt_layer_specs.LocalSpecProvider.core_attention = lambda _: PackedAttention  # type: ignore[method-assign, assignment]
utils.tex = SimpleNamespace(thd_get_partitioned_indices=parts)
LAYERS = gpt_layer_specs.get_gpt_layer_local_spec()
