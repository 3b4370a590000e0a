"""Modules of a transformer layer: upstream's specifications, with what a machine without their packages needs."""

from __future__ import annotations

import copy
from argparse import Namespace
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.pipeline.model import seeding
from megatron.pipeline.model.context_parallel import ContextParallelAttention
from megatron.pipeline.model.seeded_layers import GROUPED_EXPERTS, SeededExperts, SeededPredictionLayer


def block_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The specification of this stage's layers, dense or of experts: upstream's, with layers that draw their numbers by layer."""
    block = get_gpt_decoder_block_spec(config, _uses_engine(args), normalization=config.normalization, vp_stage=vp_stage)
    block.layer_specs = [_seeded(args, layer) for layer in block.layer_specs]
    return cast(TransformerBlockSubmodules, _replaced(block, _replacements(config)))


def prediction_spec(
    args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> MultiTokenPredictionBlockSubmodules | None:
    """The specification of this stage's layers for multi-token prediction; None where there are none.

    They are as the model's last layer is.
    """
    if not config.mtp_num_layers:
        return None
    layers = get_gpt_decoder_layer_specs(config, _uses_engine(args), normalization=config.normalization)
    last = TransformerBlockSubmodules(layer_specs=[_seeded(args, layers[-1])])
    block = get_gpt_mtp_block_spec(config, last, _uses_engine(args), vp_stage=vp_stage)
    for layer in block.layer_specs if block else ():
        layer.module, layer.params = SeededPredictionLayer, {"seed": args.seed}
        _replaced(layer, _replacements(config))
    return block


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


def _uses_engine(args: Namespace) -> bool:
    return bool(args.transformer_impl == "transformer_engine")


def _seeded(args: Namespace, layer: ModuleSpec) -> ModuleSpec:
    return ModuleSpec(seeding.SeededTransformerLayer, params={"seed": args.seed}, submodules=layer.submodules)


def _replacements(config: TransformerConfig) -> dict[type, type]:
    """Local modules that stand in for upstream's, which lack something."""
    found: dict[type, type] = {SequentialMLP: SeededExperts} | GROUPED_EXPERTS
    if config.sequence_parallel:
        found[WrappedTorchNorm] = SequenceParallelTorchNorm
    if config.context_parallel_size > 1:
        found[DotProductAttention] = ContextParallelAttention
    return found


def _replaced(spec: Any, replacements: dict[type, type]) -> Any:
    """A specification with other modules: a tree of dataclasses, which change in place, lists, and classes with arguments."""
    if isinstance(spec, type):
        return replacements.get(spec, spec)
    if isinstance(spec, partial):
        arguments = {name: _replaced(value, replacements) for name, value in spec.keywords.items()}
        return partial(_replaced(spec.func, replacements), *spec.args, **arguments)
    if isinstance(spec, list):
        return [_replaced(part, replacements) for part in spec]
    if hasattr(spec, "__dataclass_fields__"):
        for name, value in list(vars(spec).items()):
            setattr(spec, name, _replaced(value, replacements))
    return spec
