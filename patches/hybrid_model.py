"""megatron.core.models.hybrid.hybrid_model (0.18 and later): a model whose layers are the letters of a pattern, on any placement.

``HybridModel.__init__``: upstream takes the segment that a looped placement has, or without ``|`` an even share. Where the layout
in its configuration is of a placement, a chunk has the letters of its stage: ``hybrid_layer_allocation.select_pipeline_segment``,
which is looked up while the model is built, is replaced meanwhile. In a loop that has called ``megatron.pipeline.install``
(``loops``) the layout then follows ``|``, of which a configuration does not know, or without it what letters take.
``HybridStack.forward``: as ``TransformerBlock.forward`` (``transformer_block.py``). One without layers hands on a copy of what
it gets, as ``TransformerBlock`` does: a schedule frees what it sent, and keeps what it got for B.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.pipeline.patches import compat, loops, transformer_block

_PATH = "megatron.core.models.hybrid"


def install() -> None:
    if compat.has_patterns():
        compat.wrap(compat.module(f"{_PATH}.hybrid_model").HybridModel, "__init__", _build)
        compat.wrap(compat.module(f"{_PATH}.hybrid_block").HybridStack, "forward", _forward)


def _build(original: Any, model: Any, *given: Any, **options: Any) -> None:
    bound = inspect.signature(original).bind(model, *given, **options)
    bound.apply_defaults()
    call, length = bound.arguments, bound.arguments["max_sequence_length"]
    config, pattern = call["config"], call["hybrid_layer_pattern"]
    if loops.current is not None and pattern:
        loops.current.lay_out_pattern(
            config,
            pattern,
            seq_length=length,
            micro_batch_size=1,  # known with the first iteration
            padded_vocab_size=call["vocab_size"],
            max_position_embeddings=length,
            position_embedding_type=call["position_embedding_type"],
            untie_embeddings_and_output_weights=not call["share_embeddings_and_output_weights"],
        )
    segment = getattr(config.pipeline_model_parallel_layout, "segment", None)  # ``model/layout.py`` ``PlacementLayout``
    if segment is None:
        original(model, *given, **options)
        return
    module = compat.module(f"{_PATH}.hybrid_layer_allocation")
    looped, module.select_pipeline_segment = module.select_pipeline_segment, segment
    try:
        original(model, *given, **options)
    finally:
        module.select_pipeline_segment = looped


def _forward(original: Any, stack: Any, *given: Any, **options: Any) -> Any:
    output = transformer_block.forward(original, stack, *given, **options)
    return output.clone() if output is stack.input_tensor else output
