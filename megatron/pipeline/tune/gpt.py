"""What a GPT has to compute and to hold: operations and bytes of its layers, from its shape alone.

Operations are those of the matrix products, two per multiply-add, of one microbatch. Biases and norms, below 0.1 % of either,
are left out.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, replace
from typing import NamedTuple

HALF, SINGLE = 2, 4  # bytes of a number in fp16 or bf16, and in float32

# Weights in 16 bits, gradients in float32, and Adam's float32 weights and two moments; 2 less with gradients in 16 bits.
STATE_BYTES = HALF + SINGLE + 3 * SINGLE


class Work(NamedTuple):
    """Operations of one microbatch: forward, backward for the input, backward for the weights."""

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight

    def times(self, count: float) -> Work:
        return Work(*(count * operations for operations in self))


@dataclass(frozen=True)
class Shape:
    """The shape of a GPT, and of its microbatches.

    Attributes:
        layers: transformer layers.
        hidden: width h of the residual stream.
        heads, groups, head_width: attention heads, the key/value heads that they share, and the width of each.
        ffn: width of the MLP that a token passes; with experts of all those that it passes, as a mean over the layers.
        stored_ffn: the same of all that there are.
        gated: whether the MLP has two matrices before its activation instead of one.
        seq: tokens s of a sample.
        microbatch: samples b.
        vocabulary: rows V of the embedding and of the output layer, padding included.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_width: int
    ffn: float
    stored_ffn: float
    gated: bool
    seq: int
    microbatch: int
    vocabulary: int

    @classmethod
    def plain(cls, layers: int, hidden: int, heads: int, seq: int, vocabulary: int, microbatch: int = 1) -> Shape:
        """GPT-2's and GPT-3's: an MLP of four times the width, and heads that share nothing.

        Raises:
            ValueError: the width is not a multiple of the number of heads.
        """
        if hidden % heads:
            raise ValueError(f"a hidden size of {hidden} is not a multiple of {heads} heads: change one of the two")
        ffn = 4 * hidden
        return cls(layers, hidden, heads, heads, hidden // heads, ffn, ffn, False, seq, microbatch, vocabulary)

    @classmethod
    def of(cls, args: Namespace) -> Shape:
        """From Megatron-LM's flags after ``validate``, ``padded_vocab_size`` included."""
        ffn = stored = float(args.ffn_hidden_size)
        if args.num_experts:
            every, shared = args.moe_layer_freq, args.moe_shared_expert_intermediate_size or 0
            has = [float(layer % every == 0) for layer in range(args.num_layers)] if isinstance(every, int) else every
            share = sum(has) / args.num_layers
            ffn += share * (args.moe_router_topk * args.moe_ffn_hidden_size + shared - args.ffn_hidden_size)
            stored += share * (args.num_experts * args.moe_ffn_hidden_size + shared - args.ffn_hidden_size)
        return cls(
            layers=args.num_layers,
            hidden=args.hidden_size,
            heads=args.num_attention_heads,
            groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
            head_width=args.kv_channels,
            ffn=ffn,
            stored_ffn=stored,
            gated=args.swiglu,
            seq=args.seq_length,
            microbatch=args.micro_batch_size,
            vocabulary=args.padded_vocab_size,
        )

    def with_vocabulary(self, rows: int) -> Shape:
        return replace(self, vocabulary=rows)

    @property
    def tokens(self) -> int:
        """Of one microbatch: b*s."""
        return self.microbatch * self.seq

    @property
    def queries(self) -> int:
        return self.heads * self.head_width

    @property
    def keys_and_values(self) -> int:
        return 2 * self.groups * self.head_width

    def layer_weights(self, ffn: float) -> float:
        """Weights of a layer's matrices, with an MLP of so much width: 12h^2 of a plain GPT."""
        return self.hidden * (2 * self.queries + self.keys_and_values + (3 if self.gated else 2) * ffn)


def layer_work(shape: Shape, causal: bool = False) -> Work:
    """Operations of a transformer layer: F sbh(24h+4s), B sbh(24h+8s), W sbh(24h) for a plain GPT.

    Qi et al., "Zero Bubble Pipeline Parallelism", table 1; together the 72bsh^2(1 + s/6h) of Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters". Attention's two products with all keys have no weights, so no W.

    Args:
        causal: count only the half of those two that no mask hides, instead of the whole as both papers do.
    """
    products = 2 * shape.tokens * shape.layer_weights(shape.ffn)
    attention = 4 * shape.tokens * shape.seq * shape.queries * (0.5 if causal else 1.0)
    return Work(products + attention, products + 2 * attention, products)


def output_work(shape: Shape) -> Work:
    """Operations of the output layer: 2bshV each."""
    product = row_work(shape) * shape.vocabulary
    return Work(product, product, product)


def row_work(shape: Shape) -> float:
    """Operations of one product with one row of the output layer: 2bsh."""
    return 2 * shape.tokens * shape.hidden


def training_operations(shape: Shape, causal: bool = False) -> float:
    """Operations of one microbatch through the whole model, forwards and backwards, without recomputation.

    Narayanan et al. (appendix) without their activation recomputation: 72blsh^2 (1 + s/6h + V/12lh).
    """
    return layer_work(shape, causal).times(shape.layers).total + output_work(shape).total


def output_in_layers(shape: Shape, recompute: bool = False) -> float:
    """How many transformer layers take as long as the output layer: V/(12h + 2s) for a plain GPT.

    Args:
        recompute: whether layers run their forward again before the backward, as Narayanan et al. count: V/(16h + 8s/3).
    """
    layer = layer_work(shape)
    return output_work(shape).total / (layer.total + (layer.forward if recompute else 0))


def layer_activation(shape: Shape) -> float:
    """Bytes that F of a layer keeps in 16 bits: 34sbh for a plain GPT.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", section 4.1, without the 5as^2b of the
    attention matrices, which fused attention does not keep: inputs of both norms and of the products behind them (8h), queries,
    keys and values, the input of the output projection, two dropout masks (2h), and what the MLP keeps around its activation.
    """
    attention = 8 * shape.hidden + HALF * (2 * shape.queries + shape.keys_and_values)
    mlp = HALF * (3 if shape.gated else 2) * shape.ffn
    return shape.tokens * (attention + mlp) + layer_masks(shape)


def layer_masks(shape: Shape) -> float:
    """Bytes of ``layer_activation`` that W does not need: the two dropout masks, 2sbh (Qi et al., table 1: 34 - 32)."""
    return 2 * shape.tokens * shape.hidden


def output_activation(shape: Shape) -> float:
    """Bytes that megatron-core's output layer keeps until its backward: its input, and the softmax in float32."""
    return hidden_bytes(shape) + SINGLE * shape.tokens * shape.vocabulary


def shard_activation(shape: Shape, rows: int) -> float:
    """Bytes that S of a shard of so many rows keeps until T: its input, and logits in 16 bits."""
    return hidden_bytes(shape) + HALF * shape.tokens * rows


def hidden_bytes(shape: Shape) -> float:
    """Bytes of what stages hand on, in 16 bits: 2sbh."""
    return HALF * shape.tokens * shape.hidden
