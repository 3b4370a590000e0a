"""megatron.core.transformer.transformer_block: recomputation of frozen layers, and of a last unit that is shorter.

``TransformerBlock.forward``: what upstream recomputes has no gradient, whichever of its weights train, where no input needs one,
as behind a frozen embedding with adapters. Where anything is recomputed the input of layers that train needs one here.

``TransformerBlock._get_layer``: with ``recompute_method`` uniform releases before 0.17 ask for whole units of
``recompute_num_layers`` layers, also where a stage has fewer layers left. What they ask for beyond a stage's last layer is here a
layer that hands on what it gets; no setting ends a unit earlier.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.pipeline.patches import compat


class _NoLayer:
    """In the place of a layer, after the last one of its unit.

    Args:
        layer_number: upstream asks every layer for its own, for FP8.
    """

    def __init__(self, layer_number: int) -> None:
        self.layer_number = layer_number

    def __call__(self, hidden_states: Any, context: Any = None, **_: Any) -> tuple[Any, Any]:
        return hidden_states, context


def install() -> None:
    block = compat.module("megatron.core.transformer.transformer_block").TransformerBlock
    compat.wrap(block, "_get_layer", _get_layer)
    compat.wrap(block, "forward", forward)


def forward(original: Any, block: Any, hidden_states: Any, *rest: Any, **options: Any) -> Any:
    """In place of the ``forward`` of a block of layers."""
    recomputes = block.config.recompute_granularity and block.training and torch.is_grad_enabled()
    frozen = recomputes and block.pre_process and not hidden_states.requires_grad
    if frozen and any(weight.requires_grad for weight in block.parameters()):
        hidden_states = hidden_states.detach().requires_grad_()
    return original(block, hidden_states, *rest, **options)


def _get_layer(original: Any, block: Any, layer_number: int) -> Any:
    if layer_number < len(block.layers):
        return original(block, layer_number)
    return _NoLayer(block.layers[-1].layer_number)
