"""Settings of megatron-core and Megatron-LM that our schedules exclude, each with its reason."""

from __future__ import annotations

from typing import Any, NamedTuple

_ORDER = "relies on the order of megatron-core's own schedules"
_FUSED = "runs modules of Transformer Engine without the inputs from which W computes their weight gradients"
_HYBRID = "lists the layers of a hybrid model, and our schedules place those of a GPTModel"
_WEIGHTS = "shards parameters in a way that does not support delayed weight gradients"
_GRAPHS = f"(CUDA graphs) {_ORDER}"
_KERNELS = "layers launch more kernels"
_LAUNCHES = "the host launches every kernel: slower where passes are so short that it is not ahead of the device"


class Setting(NamedTuple):
    """A setting of upstream that our schedules exclude.

    Attributes:
        reason: completes a sentence that starts with the setting's name.
        in_config: whether it is refused in a ``TransformerConfig``, too, and not only as a flag of Megatron-LM.
        neutral: the number that switches it off, beside None, False and "none".
        flag: of Megatron-LM, where its name is another one.
        only: the one value that is refused; None for all but those that switch it off.
        price: of a training without it, the same but for time and memory, which is what ``--adapt`` starts; "" where it would
            be another training.
        details: settings that mean nothing without it, which ``--adapt`` leaves out, too.
    """

    reason: str
    in_config: bool = False
    neutral: int | None = None
    flag: str = ""
    only: str | None = None
    price: str = ""
    details: tuple[str, ...] = ()

    def refuses(self, settings: Any, name: str) -> bool:
        value = getattr(settings, name, None)
        return value not in (None, False, "none", self.neutral) and self.only in (None, value)


UNSUPPORTED: dict[str, Setting] = {
    "use_torch_fsdp2": Setting(_WEIGHTS),
    "use_megatron_fsdp": Setting(_WEIGHTS),
    "use_legacy_models": Setting("builds models that are not megatron-core's"),
    "yaml_cfg": Setting("replaces all flags, ours too: give flags, or a --config file of flags"),
    "delay_wgrad_compute": Setting(
        "delays weight gradients within megatron-core's own schedules; ours do so anyway", price="none, W passes are that"
    ),
    "overlap_param_gather_with_optimizer_step": Setting(
        _ORDER, price="none, each bucket of weights is gathered behind its own step"
    ),
    "hybrid_context_parallel": Setting(_ORDER, in_config=True),
    "fine_grained_activation_offloading": Setting(
        f"{_ORDER}; --offload full moves activations as the schedule says",
        in_config=True,
        price="these activations stay in the device's memory, unless --offload is given",
    ),
    "defer_embedding_wgrad_compute": Setting(_ORDER, price="none, the output layer's weight gradients are W passes"),
    "init_model_with_meta_device": Setting("builds the model without the weights that the placement cuts"),
    "overlap_p2p_comm_warmup_flush": Setting(
        _ORDER,
        in_config=True,
        flag="--overlap-p2p-communication-warmup-flush",
        price="none, messages run beside passes from the first to the last",
    ),
    "use_transformer_engine_op_fuser": Setting(_FUSED, in_config=True, price=_KERNELS),
    "use_grouped_gemm_for_dense_mlp": Setting(_FUSED, in_config=True, price=_KERNELS),
    "use_grouped_gemm_for_shared_expert": Setting(_FUSED, in_config=True, price=_KERNELS),
    "inprocess_restart": Setting(
        "restarts ranks that fail within their processes, which our watchdog ends",
        price="a rank that fails ends all, and the training has to be started again from its last checkpoint",
    ),
    "hybrid_layer_pattern": Setting(_HYBRID),
    "hybrid_override_pattern": Setting(_HYBRID),
    "moe_paged_stash": Setting(_ORDER, in_config=True, price="experts' activations take memory as tokens come"),
    "overlap_dispatch_backward_with_experts_wgrad": Setting(
        "delays the experts' weight gradients on a stream of its own; W delays them as the schedule says",
        in_config=True,
        price="tokens' way back is hidden by --overlap-moe-expert-parallel-comm alone",
    ),
    "tp_comm_overlap": Setting(
        "leaves inputs and output gradients of linears in buffers that later layers overwrite before W reads them",
        in_config=True,
        price="tensor-parallel ranks exchange activations before and behind products, not within them",
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
        "uses a weight several times in one layer, and W computes one gradient of a weight",
        in_config=True,
        neutral=1,
        price="an MLP's activations of a whole microbatch are there at once",
    ),
    "experimental_attention_variant": Setting(
        "dsa uses the weight of a linear without its forward, and W would never compute that weight's gradient",
        in_config=True,
        only="dsa",
    ),
    "optimizer_cuda_graph": Setting(_GRAPHS, price=_LAUNCHES),
    "cuda_graph_impl": Setting(
        _GRAPHS,
        in_config=True,
        price=_LAUNCHES,
        details=("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules"),
    ),
    "enable_cuda_graph": Setting(_GRAPHS, in_config=True, price=_LAUNCHES),
    "external_cuda_graph": Setting(_GRAPHS, in_config=True, price=_LAUNCHES),
    "perform_rl_step": Setting("generates text with megatron-core's own pipeline, which does not know our placements"),
}


def excluded(settings: Any, in_config: bool = False) -> list[tuple[str, Setting]]:
    """All settings that are on and that our schedules exclude, by their names.

    Args:
        settings: Megatron-LM's flags before their validation, or with ``in_config`` a ``TransformerConfig``.
    """
    rows = UNSUPPORTED.items()
    return [(name, row) for name, row in rows if (row.in_config or not in_config) and row.refuses(settings, name)]


def refuse(config: Any) -> None:
    """Raises: ValueError: a ``TransformerConfig`` has settings that our schedules exclude; with the reasons."""
    if found := excluded(config, in_config=True):
        words = "; ".join(f"{name} {setting.reason}" for name, setting in found)
        raise ValueError(f"{words}: switch {'it' if len(found) == 1 else 'them'} off, or use --pipeline-schedule stock")
