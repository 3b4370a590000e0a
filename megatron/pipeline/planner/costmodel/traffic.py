"""Bytes that kernels other than matrix products read and write: norms, activation functions, dropout, softmax.

Each kernel reads what it takes and writes what it makes, once; kernels are those of megatron-core with its fusions: activation
function with bias, dropout with residual, scaled masked softmax, and fused attention unless ``ActivationPolicy`` says otherwise.
Counts are ours, of numbers of ``ActivationPolicy.number`` bytes for each token; a mask has a byte.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.pipeline.planner.shape.description import SINGLE
from megatron.pipeline.planner.shape.gpt import Shape

# Of every token for every expert that it visits, numbers read or written in F and in B: permutations, paddings, weights by
# probabilities, buffers; casts in fewer bits; and for each number that an expert adds a bias to, which megatron-core does in
# float32 and expert by expert. Fitted together with the efficiencies of benchmarks/published_throughput.py.
COPIES, CASTS, BIASED = 12.0, 6.0, 21.0


def layer_traffic(shape: Shape) -> tuple[float, float]:
    """Bytes that F and B of a transformer layer move on one of the ranks that share it; W is products alone.

    In numbers for each token, of what ranks have whole (h) and of what they cut (heads and the MLP's width):

    - a norm reads and writes h; its B reads the gradient and h and writes a gradient, and reads both again for its weights' own;
    - dropout with its residual reads h twice and writes it with a mask; its B reads the gradient and the mask and writes a
      gradient, and the gradient that goes past the layer is added to that which went through;
    - the activation function reads what comes in (twice the width in a gated MLP) and writes what goes out, and B the other way;
    - layout and rotary embeddings read and write queries and keys, norms of these as well, and biases what they are added to; B
      sums the biases' gradients up;
    - experts' tokens are read and written on their way there and back: ``copies``.
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
        copied = copies(shape) * routed
        cut_forward, cut_backward = cut_forward + copied, cut_backward + copied
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
    an iteration, and count none; casts of experts that some tokens visit are among ``copies``.
    """
    held, quantized = shape.policy, shape.quantized
    if quantized is None:
        return 0.0, 0.0
    (whole_in, cut_in), (whole_out, cut_out) = _sides(shape)
    each = shape.tokens * quantized.share * (quantized.recipe.reads * held.number + quantized.recipe.weight)
    # What is gathered or summed over tensor-parallel ranks is cast by each for its part of the sequence.
    forward = whole_in * held.of_whole_layers + cut_in * held.of_cut_layers
    return each * forward, each * (whole_out * held.of_whole_layers + cut_out * held.of_cut_layers)


def _sides(shape: Shape) -> tuple[tuple[float, float], tuple[float, float]]:
    """Numbers of a token that linears of a layer read, and that they make: all but experts that some tokens visit.

    Each of those that tensor-parallel ranks have whole, and of those that they cut.
    """
    latent, experts, share = shape.latent, shape.experts, shape.attention
    ffn, first = shape.ffn - (experts.mean_visited_ffn if experts else 0.0), shape.parts * shape.hidden
    normed, made = (share * latent.normalised, share * latent.width) if latent else (0, 0)
    heads = share * (shape.queries + shape.projected_keys_and_values) + shape.mixer.projected
    read = first + normed, share * shape.attended + shape.mixer.mixed + ffn
    return read, (first + made, heads + (2 if shape.gated else 1) * ffn)


def copies(shape: Shape) -> float:
    """Numbers read or written for each of a token at an expert that it visits, in F and in B."""
    experts, casts = shape.experts, CASTS * shape.quantized.share if shape.quantized else 0.0
    made = 1 + (shape.matrices - 1) * experts.ffn / shape.routed_hidden if experts else 0.0
    return COPIES + casts + BIASED * made * shape.biases


def linear_traffic(shape: Shape) -> tuple[float, float, float]:
    """Bytes that F, B and W of linears read and write, without experts that some tokens visit.

    Wide products hide them. One of n operations for each byte reaches 1 / sqrt(1 + (ridge / n)^2) of what a wide one does, where
    the ridge is the device's own: operations over bytes that it can do in a second.
    """
    held, tokens = shape.policy, shape.tokens / shape.policy.context
    ins, outs = (tokens * (whole + cut / held.tensor) for whole, cut in _sides(shape))
    visited = shape.experts.mean_visited_ffn if shape.experts else 0.0
    weights = (shape.layer_weights - shape.matrices * shape.routed_hidden * visited) / held.tensor
    return _of_products(shape, ins, outs, weights)


def output_traffic(shape: Shape) -> tuple[float, float, float]:
    """Those of the output layer."""
    held, rows = shape.policy, shape.vocabulary / shape.policy.tensor
    tokens = shape.tokens / held.context
    return _of_products(replace(shape, quantized=None), tokens * shape.hidden, tokens * rows, shape.hidden * rows)


def expert_products_traffic(shape: Shape) -> tuple[float, float, float]:
    """Those of experts that some tokens visit: of every token that visits one, and of every weight of the experts of the rank."""
    held, experts = shape.policy, shape.experts
    if experts is None:
        return 0.0, 0.0, 0.0
    visits = experts.share * experts.visits * shape.tokens / held.context / held.tensor * experts.tensor
    width = experts.ffn / experts.tensor
    weights = experts.share * experts.count / experts.parallel * shape.matrices * shape.routed_hidden * width
    ins, outs = shape.routed_hidden + width, shape.routed_hidden + (shape.matrices - 1) * width  # numbers of a visit
    return _of_products(shape, visits * ins, visits * outs, weights)


def _of_products(shape: Shape, ins: float, outs: float, weights: float) -> tuple[float, float, float]:
    """Bytes from numbers of inputs, outputs and weights: W reads and writes the gradient of each weight in float32."""
    number = shape.policy.number
    read = shape.quantized.mean(number, shape.quantized.recipe.number) if shape.quantized else number
    moved = read * ins + number * outs, read * outs + number * ins
    return moved[0] + read * weights, moved[1] + read * weights, read * (ins + outs) + 2 * SINGLE * weights


def expert_traffic(shape: Shape) -> tuple[float, float]:
    """Bytes of those that the experts of a layer move which some tokens visit: the activation function's, and half of what copies
    their tokens."""
    held, experts = shape.policy, shape.experts
    if experts is None:
        return 0.0, 0.0
    before, width = 2 if shape.gated else 1, experts.mean_visited_ffn
    copied = copies(shape) / 2 * experts.share * experts.visits * shape.routed_hidden
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
