"""megatron.core.transformer.transformer_block: uniform recomputation whose last unit is shorter.

``TransformerBlock._get_layer``: with ``recompute_method`` uniform releases before 0.17 ask for whole units of
``recompute_num_layers`` layers, also where a stage has fewer layers left. What they ask for beyond a stage's last layer is here a
layer that hands on what it gets; no setting ends a unit earlier.
"""

from __future__ import annotations

from typing import Any

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
    compat.wrap(compat.module("megatron.core.transformer.transformer_block").TransformerBlock, "_get_layer", _get_layer)


def _get_layer(original: Any, block: Any, layer_number: int) -> Any:
    if layer_number < len(block.layers):
        return original(block, layer_number)
    return _NoLayer(block.layers[-1].layer_number)
