"""Which modules a transformer layer is made of: upstream's specifications, with what a machine without their packages needs."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from megatron.pipeline.model import random


def block_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    """The specification of this stage's layers: upstream's, with layers that draw their numbers by layer."""
    if args.transformer_impl == "transformer_engine":
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer = ModuleSpec(random.SeededTransformerLayer, params={"seed": args.seed}, submodules=spec.submodules)
    if not config.sequence_parallel or spec.submodules.input_layernorm is not WrappedTorchNorm:
        return layer
    _replace_norms(spec.submodules)
    layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=SequenceParallelTorchNorm)


class SequenceParallelTorchNorm:
    """torch's LayerNorm or RMSNorm under sequence parallelism, for machines without Transformer Engine and apex.

    Every rank normalises its shard of the sequence; the mark on the parameters makes ``finalize_model_grads`` add up
    their gradients over the tensor-parallel group. (Upstream's wrapper refuses sequence parallelism.)
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:  # type: ignore[misc]
        unaware = copy.copy(config)
        unaware.sequence_parallel = False
        norm: torch.nn.Module = WrappedTorchNorm(unaware, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return norm


def _replace_norms(submodules: Any) -> None:
    """Put the sequence-parallel norm wherever a layer's specification (a tree of dataclasses) names the wrapped one."""
    for name, value in list(vars(submodules).items()):
        if value is WrappedTorchNorm:
            setattr(submodules, name, SequenceParallelTorchNorm)
        elif isinstance(value, ModuleSpec) and value.submodules is not None:
            _replace_norms(value.submodules)
