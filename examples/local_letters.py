"""The letters of ``HybridModel`` without Transformer Engine, as on a CPU: ``--spec local_letters STACK``.

megatron-core's own specification has modules of Transformer Engine. This one has its local ones: attention (``*``, latent
``+``), MLP (``-``) and experts (``E``), which are halves of a GPT's layer; Mamba-2 (``M``) and gated delta net (``G``), which
need packages with GPU kernels, as upstream; and layers behind ``/``. In checkpoints names are those that Transformer Engine's
modules have.
"""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import MoETransformerLayer

from megatron.pipeline.model.context_parallel import ContextParallelAttention
from megatron.pipeline.model.layer_spec import SequenceParallelTorchNorm


class Norm:
    """torch's LayerNorm or RMSNorm, also under sequence parallelism."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:  # type: ignore[misc]
        kind: Any = SequenceParallelTorchNorm if config.sequence_parallel else WrappedTorchNorm
        norm: torch.nn.Module = kind(config, hidden_size, eps)
        return norm


class Core:
    """megatron-core's local attention, also over a shared sequence, and of values as narrow as latent attention has them."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, k_channels: int | None = None, v_channels: int | None = None, **options: Any
    ) -> torch.nn.Module:
        kind = ContextParallelAttention if config.context_parallel_size > 1 else DotProductAttention
        core = kind(config, **options)
        if v_channels:
            core.hidden_size_per_partition = v_channels * core.num_attention_heads_per_partition
        return core


class LocalStack(HybridStack):
    """megatron-core's stack of layers, whose last norm is Transformer Engine's otherwise."""

    def __init__(self, config: TransformerConfig, *given: Any, post_layer_norm: bool = True, **options: Any) -> None:
        super().__init__(config, *given, post_layer_norm=False, **options)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = Norm(config, config.hidden_size, config.layernorm_epsilon)


class ExpertsLayer(MoETransformerLayer):
    """Experts, whose biases megatron-core adds in place to what a function of its own has returned: torch forbids that, under any
    schedule, where no ranks share experts."""

    def __init__(self, config: TransformerConfig, *given: Any, **options: Any) -> None:
        if config.add_bias_linear and config.tensor_model_parallel_size == config.expert_model_parallel_size == 1:
            raise ValueError("experts (E) of local_letters train without biases: give --disable-bias-linear")
        super().__init__(config, *given, **options)


def _half(kind: type[TransformerLayer], *parts: str, **options: Any) -> ModuleSpec:
    """A layer with some of the parts that a GPT's layer has."""
    layer = get_gpt_layer_local_spec(**options).submodules
    taken = {part: getattr(layer, part) for part in (*parts, "sharded_state_dict_keys_map")}
    norm = "input_layernorm" if "self_attention" in parts else "pre_mlp_layernorm"
    if "self_attention" in parts:
        layer.self_attention.submodules.core_attention = Core
    return ModuleSpec(kind, submodules=TransformerLayerSubmodules(**taken, **{norm: Norm}))


_MIXER = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear))
_DELTA = ModuleSpec(
    GatedDeltaNet,
    submodules=GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear),
)
_FURTHER = MultiTokenPredictionLayerSubmodules(
    enorm=Norm, hnorm=Norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=Norm
)
_LATENT: dict[str, Any] = {}
if "mla_layer" in HybridStackSubmodules.__dataclass_fields__:  # from 0.19 on
    _LATENT = {"mla_layer": _half(TransformerLayer, "self_attention", "self_attn_bda", multi_latent_attention=True)}
STACK = ModuleSpec(
    LocalStack,
    submodules=HybridStackSubmodules(
        attention_layer=_half(TransformerLayer, "self_attention", "self_attn_bda"),
        **_LATENT,
        mlp_layer=_half(MLPLayer, "mlp", "mlp_bda"),
        moe_layer=_half(ExpertsLayer, "mlp", "mlp_bda", num_experts=8),  # any number: the flags say it
        mamba_layer=ModuleSpec(
            MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=Norm,
                mixer=_MIXER,
                mamba_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
            ),
        ),
        gdn_layer=ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=Norm,
                self_attention=_DELTA,
                self_attn_bda=get_bias_dropout_add,
                sharded_state_dict_keys_map={"input_layernorm.": "self_attention.in_proj.layer_norm_"},
            ),
        ),
        mtp_block_spec=ModuleSpec(
            MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules([ModuleSpec(MultiTokenPredictionLayer, submodules=_FURTHER)]),
        ),
    ),
)
