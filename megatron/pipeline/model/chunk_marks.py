"""The layers of a chunk, in the metadata of its ``state_dict()``: a loop that saves by chunk may load under another placement."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import GraphableMegatronModule

_LAYERS = "megatron_pipeline_layers"


def mark(chunk: torch.nn.Module) -> None:
    """Have ``state_dict`` say which of the model's layers a chunk has, and ``load_state_dict`` refuse what says others.

    Names in it count from 0 in every chunk. What says nothing, as sharded checkpoints and those of unmarked models, is taken.
    """
    chunk.register_state_dict_post_hook(_say)
    chunk.register_load_state_dict_pre_hook(_compare)


def _layers(chunk: torch.nn.Module) -> list[int]:
    layers = (module for module in chunk.modules() if isinstance(module, GraphableMegatronModule))  # of transformers, or Mamba's
    return [layer.layer_number for layer in layers if hasattr(layer, "layer_number")]


def _say(chunk: torch.nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any]) -> None:
    metadata[_LAYERS] = _layers(chunk)


def _compare(chunk: torch.nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    if (saved := metadata.get(_LAYERS)) not in (None, own := _layers(chunk)):
        raise ValueError(
            f"load_state_dict: the weights are those of a chunk with the layers {saved}, and this chunk has {own}: load them "
            "under the schedule that saved them, and save them with megatron.core.dist_checkpointing, which any schedule loads"
        )
