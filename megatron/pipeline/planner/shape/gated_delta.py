"""Gated delta nets: a convolution over a few tokens, and a state for each head that tokens correct one after another."""

from __future__ import annotations

from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.mixer import Mixer

_CHUNK = 64  # tokens within which products of all with all stand for the state, as in the kernels that megatron-core calls


def mixer(model: ModelDescription) -> Mixer:
    """Numbers of a layer, from Megatron-LM's flags after ``validate``.

    Yang et al., "Gated Delta Networks" (arXiv 2412.06464), section 3.3: the first linear makes queries, keys, values, their gate,
    and two numbers for each head of values; queries and keys are repeated where several of these share them. Of a chunk, products
    are keys with keys, twice what these have corrected of keys and of values, queries with keys, these with values, and three of
    states. F keeps queries and keys before and after they are repeated, values, what the states give, its norm and a copy of the
    gate, and a chunk's corrections. B makes corrections and states again. Each kernel reads what it takes and writes what it
    makes.
    """
    heads = model.linear_num_value_heads
    keys, values = model.linear_num_key_heads * model.linear_key_head_dim, heads * model.linear_value_head_dim
    repeated, convolved, corrections = heads * model.linear_key_head_dim, 2 * keys + values, heads * _CHUNK
    operations = 2 * _CHUNK * (3 * repeated + 2 * values) + 6 * repeated * model.linear_value_head_dim
    states = repeated * model.linear_value_head_dim / _CHUNK
    moved = 2 * convolved + 6 * keys + 9 * repeated + 13 * values + 2 * corrections + 2 * states
    return Mixer(
        projected=convolved + values + 2 * heads,
        mixed=values,
        kept=2 * keys + 2 * repeated + 4 * values + corrections,
        parameters=model.linear_conv_kernel_dim * convolved + 2 * heads + model.linear_value_head_dim,
        forward=operations,
        backward=3 * operations,
        moved_forward=moved,
        moved_backward=3 * moved,
    )
