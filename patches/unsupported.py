"""Settings of megatron-core and Megatron-LM that our schedules exclude, each with its reason."""

from __future__ import annotations

from typing import Any, NamedTuple

_ORDER = "relies on the order of megatron-core's own schedules"
_FUSED = "runs modules of Transformer Engine without the inputs from which W computes their weight gradients"
_HYBRID = "lists the layers of a hybrid model, and our schedules place those of a GPTModel"
_WEIGHTS = "shards parameters in a way that does not support delayed weight gradients"


class Setting(NamedTuple):
    """A setting of upstream that our schedules exclude.

    Attributes:
        reason: completes a sentence that starts with the setting's name.
        in_config: whether it is refused in a ``TransformerConfig``, too, and not only as a flag of Megatron-LM.
        neutral: the number that switches it off, beside None, False and "none".
        flag: of Megatron-LM, where its name is another one.
        only: the one value that is refused; None for all but those that switch it off.
    """

    reason: str
    in_config: bool = False
    neutral: int | None = None
    flag: str = ""
    only: str | None = None

    def refuses(self, value: Any) -> bool:
        return value not in (None, False, "none", self.neutral) and self.only in (None, value)


UNSUPPORTED: dict[str, Setting] = {
    "use_torch_fsdp2": Setting(_WEIGHTS),
    "use_megatron_fsdp": Setting(_WEIGHTS),
    "use_legacy_models": Setting("builds models that are not megatron-core's"),
    "yaml_cfg": Setting("replaces all flags, ours too: give flags, or a --config file of flags"),
    "delay_wgrad_compute": Setting("delays weight gradients within megatron-core's own schedules; ours do so anyway"),
    "overlap_param_gather_with_optimizer_step": Setting(_ORDER),
    "hybrid_context_parallel": Setting(_ORDER, in_config=True),
    "fine_grained_activation_offloading": Setting(
        f"{_ORDER}; --offload full moves activations as the schedule says", in_config=True
    ),
    "defer_embedding_wgrad_compute": Setting(_ORDER),
    "init_model_with_meta_device": Setting("builds the model without the weights that the placement cuts"),
    "overlap_p2p_comm_warmup_flush": Setting(_ORDER, in_config=True, flag="--overlap-p2p-communication-warmup-flush"),
    "use_transformer_engine_op_fuser": Setting(_FUSED, in_config=True),
    "use_grouped_gemm_for_dense_mlp": Setting(_FUSED, in_config=True),
    "use_grouped_gemm_for_shared_expert": Setting(_FUSED, in_config=True),
    "inprocess_restart": Setting("restarts ranks that fail within their processes, which our watchdog ends"),
    "hybrid_layer_pattern": Setting(_HYBRID),
    "hybrid_override_pattern": Setting(_HYBRID),
    "moe_paged_stash": Setting(_ORDER, in_config=True),
    "overlap_dispatch_backward_with_experts_wgrad": Setting(
        "delays the experts' weight gradients on a stream of its own; W delays them as the schedule says", in_config=True
    ),
    "tp_comm_overlap": Setting(
        "leaves inputs and output gradients of linears in buffers that later layers overwrite before W reads them", in_config=True
    ),
    "fp4": Setting("is not tested with delayed weight gradients (--fp8-format is)", in_config=True, flag="--fp4-format"),
    "fp8_output_proj": Setting(
        "computes the output layer in FP8, which is tested neither with delayed weight gradients nor with --vocab-parallel",
        in_config=True,
    ),
    "tensor_parallel_num_weight_shards": Setting(_WEIGHTS),
    "expert_tensor_parallel_num_weight_shards": Setting(_WEIGHTS),
    "gtp_weight_remat_size": Setting(_WEIGHTS, in_config=True, neutral=1, flag="--tensor-parallel-num-weight-shards"),
    "expert_gtp_weight_remat_size": Setting(
        _WEIGHTS, in_config=True, neutral=1, flag="--expert-tensor-parallel-num-weight-shards"
    ),
    "mlp_chunks_for_training": Setting(
        "uses a weight several times in one layer, and W computes one gradient of a weight", in_config=True, neutral=1
    ),
    "experimental_attention_variant": Setting(
        "dsa uses the weight of a linear without its forward, and W would never compute that weight's gradient",
        in_config=True,
        only="dsa",
    ),
    "optimizer_cuda_graph": Setting(f"(CUDA graphs) {_ORDER}"),
    "cuda_graph_impl": Setting(f"(CUDA graphs) {_ORDER}", in_config=True),
    "enable_cuda_graph": Setting(f"(CUDA graphs) {_ORDER}", in_config=True),
    "external_cuda_graph": Setting(f"(CUDA graphs) {_ORDER}", in_config=True),
    "perform_rl_step": Setting("generates text with megatron-core's own pipeline, which does not know our placements"),
}


def reason(settings: Any, in_config: bool = False) -> tuple[str, str] | None:
    """The first setting that our schedules exclude, and the reason; None if there is none.

    Args:
        settings: Megatron-LM's flags before their validation, or with ``in_config`` a ``TransformerConfig``.
    """
    for name, setting in UNSUPPORTED.items():
        if (setting.in_config or not in_config) and setting.refuses(getattr(settings, name, None)):
            return name, setting.reason
    return None


def refuse(config: Any) -> None:
    """Raises: ValueError: a ``TransformerConfig`` has a setting that our schedules exclude; with the reason."""
    if refused := reason(config, in_config=True):
        raise ValueError("{} {}: switch it off, or use --pipeline-schedule stock".format(*refused))
