"""Mamba-2: a convolution over a few tokens, and a state for each head that tokens read and write one after another."""

from __future__ import annotations

from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.mixer import Mixer

_CHUNK = 128  # tokens within which products of all with all stand for the state, as in megatron-core's kernel
_TAPS = 4  # tokens of the convolution


def mixer(model: ModelDescription) -> Mixer:
    """Numbers of a layer, from Megatron-LM's flags after ``validate``.

    Dao and Gu, "Transformers are SSMs", sections 6 and 7: the first linear makes the gate, the inputs, what groups of heads write
    to and read from their states, and a step for each head. The convolution has weights and a bias, each head three numbers, and
    there is a norm behind the gate. F keeps what the states give before and after the gate. Products are within chunks and with
    states; B makes convolution and states again. Each kernel reads what it takes and writes what it makes; states of chunks, in
    float32, are passed on once.
    """
    heads, state = model.mamba_num_heads or 2 * model.hidden_size // model.mamba_head_dim, model.mamba_state_dim
    inner, groups = heads * model.mamba_head_dim, model.mamba_num_groups * state
    convolved = inner + 2 * groups
    operations = 2 * _CHUNK * (groups + inner) + 4 * state * inner
    moved = 4 * convolved + 5 * inner + 8 * inner * state / _CHUNK
    return Mixer(
        projected=inner + convolved + heads,
        mixed=inner,
        kept=2 * inner,
        parameters=(_TAPS + 1) * convolved + 3 * heads + inner,
        forward=operations,
        backward=3 * operations,
        moved_forward=moved,
        moved_backward=3 * moved,
    )
