"""Bytes that the kernels of a GPT read and write which are no matrix products: norms, activation functions, dropout, softmax.

Each kernel reads what it takes and writes what it makes, once; kernels are those of megatron-core with its fusions: activation
function with bias, dropout with residual, scaled masked softmax, and fused attention unless ``Holding`` says otherwise. Counts are
ours, of numbers of ``Holding.number`` bytes for each token; a mask has a byte.
"""

from __future__ import annotations

from megatron.pipeline.tune.activations import hidden_bytes
from megatron.pipeline.tune.gpt import SINGLE, Shape


def layer_traffic(shape: Shape) -> tuple[float, float]:
    """Bytes that F and B of a transformer layer move on one of the ranks that share it; W is products alone.

    F: two norms read and write h; two residual additions read h twice and write it, with dropout a mask too; the MLP's activation
    function reads its input and writes its output; rotary embeddings and the layout of heads read and write queries and keys; norms
    of these too. B: each of them reads the gradient and what F kept, and writes a gradient; norms and biases sum theirs up.
    """
    held, number = shape.holding, shape.holding.number
    fan = (2 if shape.gated else 1) * shape.ffn
    heads = shape.queries + shape.keys_and_values / 2
    mask = 0.5 * held.hidden_masks * (2 / number)
    whole_forward = (4 + 6 + 2 * mask) * shape.hidden
    whole_backward = (10 + 8 + 2 * mask) * shape.hidden
    cut_forward, cut_backward = fan + shape.ffn + 2 * heads, 2 * fan + shape.ffn + 2 * heads
    if shape.biases:
        whole_backward += 2 * shape.hidden
        cut_forward += 2 * (shape.queries + shape.keys_and_values)
        cut_backward += fan + shape.queries + shape.keys_and_values
    if shape.qk_norm:
        cut_forward, cut_backward = cut_forward + 2 * heads, cut_backward + 3 * heads
    if shape.experts:  # tokens go to their experts and come back, weighted
        routed = shape.experts.share * shape.experts.topk * shape.hidden
        cut_forward, cut_backward = cut_forward + 4 * routed, cut_backward + 4 * routed
    if held.attention_matrices:
        # Scores are written, read by the softmax, which writes, read by dropout, which writes them with a mask, read with the values.
        dropped = (2 + 1 / number) * held.attention_masks
        cut_forward += shape.seq * shape.heads * (4 + dropped)
        cut_backward += shape.seq * shape.heads * (7 + dropped)
    whole, cut = held.of_whole_layers * number * shape.tokens, held.of_cut_layers * number * shape.tokens
    return whole * whole_forward + cut * cut_forward, whole * whole_backward + cut * cut_backward


def loss_traffic(shape: Shape, rows: float, spread: bool = False) -> tuple[float, float]:
    """Bytes that the cross entropy of so many rows of the vocabulary moves, forward and backward.

    megatron-core's fused kernels read logits and write what takes their place, and then read that for the gradient.

    Args:
        spread: under ``--vocab-parallel`` logits are made float32 before, to be summed over all ranks, and so is their gradient.
    """
    number, entries = shape.holding.number, shape.tokens / shape.holding.context * rows
    if spread:
        return entries * (number + 2 * SINGLE), entries * (number + SINGLE)
    return entries * 2 * number, entries * number


def embedding_traffic(shape: Shape) -> tuple[float, float]:
    """Bytes of looking rows up and adding gradients to them: F reads and writes rows, B reads the gradient and adds it in float32."""
    part = hidden_bytes(shape)
    return 2 * part, 5 * part
