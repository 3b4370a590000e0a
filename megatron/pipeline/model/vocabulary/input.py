"""The input layer in shards: IF looks up the tokens that a shard has, IB adds up the gradient of their rows."""

from __future__ import annotations

import torch
from einops import rearrange

from megatron.pipeline.backward import weight_tasks
from megatron.pipeline.backward.linear import gradient_of, mark_accumulated
from megatron.pipeline.distributed.sequence import gather, reduce_scatter
from megatron.pipeline.model.vocabulary.tied import TiedGradient
from megatron.pipeline.planner import Shards


class EmbeddingShard(torch.nn.Module):
    """A shard of the word embeddings.

    Args:
        weight: [shards.rows, h].
        shards: how the vocabulary is cut.
        index: which shard this is.
        tp_group: tensor-parallel ranks, each of which has another shard; None for no such ranks.
        reduce_scatter: sum over ``tp_group`` in IF, each rank getting a slice of the sequence, as megatron-core's embedding
            does under sequence parallelism without position embeddings.
        tied: for a weight that is the output layer's too.
    """

    register_wgrad_accumulation_and_reduce_hooks = weight_tasks.register_hook

    def __init__(
        self,
        weight: torch.nn.Parameter,
        shards: Shards,
        index: int,
        tp_group: torch.distributed.ProcessGroup | None = None,
        reduce_scatter: bool = False,
        tied: TiedGradient | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.shards = shards
        self.index = index
        self.sequence_group = tp_group if reduce_scatter else None
        self.tied = tied
        weight_tasks.prepare(weight)

    @torch.no_grad()
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """IF: this shard's part of the embeddings, zero for tokens of other shards.

        Args:
            tokens: [b, s].

        Returns:
            [b, s, h] to be summed over all shards, or with ``reduce_scatter`` [s / t, b, h] to be summed over the pipeline.
        """
        rows, own = locate(tokens, self.shards, self.index)
        part = torch.nn.functional.embedding(rows, self.weight).masked_fill_(~own[..., None], 0)
        if self.sequence_group is None:
            return part
        part = rearrange(part, "batch sequence hidden -> sequence batch hidden").contiguous()
        part, reduction = reduce_scatter(part, self.sequence_group)
        reduction.wait()
        return part

    @torch.no_grad()
    def backward(self, tokens: torch.Tensor, gradient: torch.Tensor) -> None:
        """IB: add a microbatch's gradient to that of the weight, and notify DDP.

        It goes straight into ``main_grad`` where there is one, in its precision. On a GPU the order of the sums is open, unless
        ``torch.use_deterministic_algorithms`` is on.

        Args:
            tokens: [b, s], as for IF.
            gradient: by the summed embeddings, in their shape.
        """
        if self.sequence_group is not None:
            gradient, gathering = gather(gradient, self.sequence_group)
            gathering.wait()
            gradient = rearrange(gradient, "sequence batch hidden -> batch sequence hidden")
        rows, own = locate(tokens, self.shards, self.index)
        weight = self.weight
        total = gradient_of(weight)
        added_to = self.tied.of_input(total) if self.tied else total
        by_token = rearrange(gradient.masked_fill(~own[..., None], 0), "batch sequence hidden -> (batch sequence) hidden")
        added_to.index_add_(0, rows.flatten(), by_token.to(total.dtype))
        if total is not weight.grad:
            mark_accumulated(weight)
        if self.tied:
            self.tied.added(total)
        weight_tasks.notify(weight)


class ReceivedEmbedding(torch.nn.Module):
    """Stands for the word embeddings on the first stage: returns what the shards have made of the tokens.

    Attributes:
        tensor: for the next forward, which takes it: the sum of all shards' IF, in the shape that IF
            returned. Its gradient is what IB needs.
    """

    tensor: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tensor, self.tensor = self.tensor, None
        if tensor is None:
            raise RuntimeError("the first stage runs its forward before the embeddings of the microbatch have arrived")
        return tensor


def locate(tokens: torch.Tensor, shards: Shards, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of every token within its shard, and whether that is shard ``index``.

    Tokens of other shards map to all rows, so that their additions of zero do not wait for each other.
    """
    return tokens % shards.rows, tokens.div(shards.rows, rounding_mode="floor") == index
