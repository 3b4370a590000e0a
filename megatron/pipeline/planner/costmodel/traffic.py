"""Bytes that kernels other than matrix products read and write: norms, activation functions, dropout, softmax.

Each kernel reads what it takes and writes what it makes, once; kernels are those of megatron-core with its fusions: activation
function with bias, dropout with residual, scaled masked softmax, and fused attention unless ``ActivationPolicy`` says otherwise.
Counts are ours, of numbers of ``ActivationPolicy.number`` bytes for each token; a mask has a byte.
"""

from __future__ import annotations

from megatron.pipeline.planner.shape.description import SINGLE
from megatron.pipeline.planner.shape.gpt import Shape

# Of every token for every expert that it visits, numbers read or written in F and in B: permutations, paddings, casts, weights by
# probabilities, buffers. Fitted together with the efficiencies of benchmarks/published_throughput.py, one of 18 values that were
# tried on its rows; 4 would be those of its copies there and back alone; all experts of these are grouped.
_COPIES = 18


def layer_traffic(shape: Shape) -> tuple[float, float]:
    """Bytes that F and B of a transformer layer move on one of the ranks that share it; W is products alone.

    In numbers for each token, of what ranks have whole (h) and of what they cut (heads and the MLP's width):

    - a norm reads and writes h; its B reads the gradient and h and writes a gradient, and reads both again for its weights' own;
    - dropout with its residual reads h twice and writes it with a mask; its B reads the gradient and the mask and writes a
      gradient, and the gradient that goes past the layer is added to that which went through;
    - the activation function reads what comes in (twice the width in a gated MLP) and writes what goes out, and B the other way;
    - layout and rotary embeddings read and write queries and keys, norms of these as well, and biases what they are added to; B
      sums the biases' gradients up;
    - experts' tokens are read and written on their way there and back, ``_COPIES`` times.
    """
    held, number = shape.policy, shape.policy.number
    share, parts = shape.attention, shape.parts
    before, heads = (2 if shape.gated else 1) * shape.ffn, share * shape.queries_and_keys
    masks = parts * held.hidden_masks / number
    whole_forward, whole_backward = parts * (2.0 + 3) * shape.hidden, parts * (5.0 + 5) * shape.hidden
    cut_forward = before + shape.ffn + 2 * heads + shape.mixer.moved_forward
    cut_backward = 2 * before + shape.ffn + 2 * heads + shape.mixer.moved_backward
    if shape.biases:
        whole_backward += parts * shape.hidden
        cut_backward += before
    if shape.qkv_bias:
        cut_forward += 2 * share * (shape.queries + shape.keys_and_values)
        cut_backward += share * (shape.queries + shape.keys_and_values)
    if shape.qk_norm and shape.latent:
        whole_forward += 2 * share * shape.latent.normalised
        whole_backward += 5 * share * shape.latent.normalised
    elif shape.qk_norm:
        cut_forward, cut_backward = cut_forward + 2 * heads, cut_backward + 5 * heads
    if shape.experts:
        routed = shape.experts.share * shape.experts.visits * shape.routed_hidden
        cut_forward, cut_backward = cut_forward + _COPIES * routed, cut_backward + _COPIES * routed
    if held.attention_matrices:
        # Scores are written, read and written by the softmax and, with a mask, by dropout, and read with the values.
        dropped = (2 + 1 / number) * held.attention_masks
        cut_forward += share * shape.seq * shape.heads * (4 + dropped)
        cut_backward += share * shape.seq * shape.heads * (7 + dropped)
    whole, cut = held.of_whole_layers * number * shape.tokens, held.of_cut_layers * number * shape.tokens
    cast_forward, cast_backward = cast_traffic(shape)
    return (
        whole * (whole_forward + masks * shape.hidden) + cut * cut_forward + cast_forward,
        whole * (whole_backward + masks * shape.hidden) + cut * cut_backward + cast_backward,
    )


def cast_traffic(shape: Shape) -> tuple[float, float]:
    """Bytes that F and B of a layer move until inputs of linears, and gradients of their outputs, are in fewer bits.

    Each number is read in 16 bits, and written once for products by rows and once for those by columns. Weights are cast once in
    an iteration, and count none; casts of experts that some tokens visit are among ``_COPIES``.
    """
    held, quantized = shape.policy, shape.quantized
    if quantized is None:
        return 0.0, 0.0
    latent, experts = shape.latent, shape.experts
    ffn = shape.ffn - (experts.mean_visited_ffn if experts else 0.0)
    share, first = shape.attention, shape.parts * shape.hidden
    normed, made = (share * latent.normalised, share * latent.width) if latent else (0, 0)
    each = shape.tokens * quantized.share * (quantized.recipe.reads * held.number + quantized.recipe.weight)
    forward = (first + normed) * held.of_whole_layers + (share * shape.attended + shape.mixer.mixed + ffn) * held.of_cut_layers
    heads = share * (shape.queries + shape.projected_keys_and_values) + shape.mixer.projected
    backward = (first + made) * held.of_whole_layers + (heads + (2 if shape.gated else 1) * ffn) * held.of_cut_layers
    return each * forward, each * backward


def expert_products_traffic(shape: Shape) -> tuple[float, float, float]:
    """Bytes that F, B and W of products of experts which some tokens visit read and write: what makes thin ones slow.

    Of every token that visits an expert, and of every weight of the experts that the rank has: W reads and writes the gradient of
    each in float32. Wide products of dense layers hide theirs, and count none.
    """
    held, experts = shape.policy, shape.experts
    if experts is None:
        return 0.0, 0.0, 0.0
    matrices, number = shape.matrices, held.number
    read = shape.quantized.mean(number, shape.quantized.recipe.number) if shape.quantized else number
    visits = experts.share * experts.visits * shape.tokens / held.context / held.tensor * experts.tensor
    width = experts.ffn / experts.tensor
    weights = experts.share * experts.count / experts.parallel * matrices * shape.routed_hidden * width
    ins, outs = shape.routed_hidden + width, shape.routed_hidden + (matrices - 1) * width  # numbers of a visit
    forward = visits * (read * ins + number * outs) + read * weights
    backward = visits * (read * outs + number * ins) + read * weights
    return forward, backward, visits * read * (ins + outs) + 2 * SINGLE * weights


def expert_traffic(shape: Shape) -> tuple[float, float]:
    """Bytes of those that the experts of a layer move which some tokens visit: the activation function's, and half of what copies
    their tokens."""
    held, experts = shape.policy, shape.experts
    if experts is None:
        return 0.0, 0.0
    before, width = 2 if shape.gated else 1, experts.mean_visited_ffn
    copied = _COPIES / 2 * experts.share * experts.visits * shape.routed_hidden
    each = held.of_cut_layers * held.number * shape.tokens
    return each * ((before + 1) * width + copied), each * ((2 * before + 1) * width + copied)


def loss_traffic(shape: Shape, rows: float, sharded: bool = False) -> tuple[float, float]:
    """Bytes that the cross entropy of ``rows`` rows of the vocabulary moves, forward and backward.

    Forward reads logits and writes their softmax in float32 (``activations.output_activation``), backward reads that and writes a
    gradient of the logits' precision.

    Args:
        sharded: with ``--vocab-parallel``, which makes exponentials in float32 before it can divide them by the sum of all ranks.
    """
    number, entries = shape.policy.number, shape.tokens / shape.policy.context * rows
    return entries * (number + (2 if sharded else 1) * SINGLE), entries * (number + SINGLE)


def embedding_traffic(shape: Shape, share: float = 1.0) -> tuple[float, float]:
    """Bytes of looking rows up and of adding gradients to them.

    F reads rows and writes hidden states, B reads their gradient and adds it to the rows' in float32.

    Args:
        share: of the tokens whose rows a rank has; what it does not have is zero.
    """
    part = shape.hidden_bytes
    return (1 + share) * part, (1 + share * 2 * SINGLE / shape.policy.number) * part
