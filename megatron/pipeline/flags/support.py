"""Features of Megatron-LM under our schedules: one table, for ``mpipe support``, docs/support.md and launch's warnings.

Everything marked as tested was tested on CPUs over gloo; nothing here has run on a GPU yet.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

__all__ = ["FEATURES", "Feature", "Support", "of_flag", "unsupported", "untested"]


class Support(StrEnum):
    """Result of a feature under a schedule of ours."""

    TESTED = "tested"
    UNTESTED = "untested"  # accepted, with a warning at the start
    REFUSED = "refused"


_YES, _WARNS, _NO = Support.TESTED, Support.UNTESTED, Support.REFUSED


class Feature(NamedTuple):
    """One feature of Megatron-LM.

    Attributes:
        title: what its users call it.
        names: the settings that switch it on, as Megatron-LM's parser names them, with the values that do; no values for all
            but None, False and "none".
        trainer: under this project's ``pretrain_gpt.py``. What is refused there has no flag, or a value that is refused.
        launch: under ``mpipe launch`` of Megatron-LM's own script.
        note: with what condition, or what to use in its place.
        details: settings that belong to it and, since Megatron-LM's parser gives them values of its own, do not switch it on.
    """

    title: str
    names: Mapping[str, Collection[Any]]
    trainer: Support
    launch: Support
    note: str = ""
    details: tuple[str, ...] = ()

    def is_on(self, args: Namespace) -> bool:
        given = {name: getattr(args, name, None) for name in self.names}
        return any(
            value in self.names[name] if self.names[name] else value not in (None, False, "none") for name, value in given.items()
        )


def _on(*names: str) -> dict[str, Collection[Any]]:
    return dict.fromkeys(names, ())


FEATURES = (
    Feature("bfloat16", _on("bf16"), _YES, _YES),
    Feature("float16, with a loss scale", _on("fp16"), _YES, _YES),
    Feature("output layer in FP8", _on("fp8_output_proj"), _NO, _NO),
    Feature("FP8", _on("fp8", "fp8_param_gather", "te_precision_config_file", "kitchen_config_file", "kitchen_recipe_number"),
        _NO, _WARNS,
        "needs Transformer Engine and a GPU; without --offload and --post-validation; mpipe tune and mpipe memory predict it",
        ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
         "reuse_grad_buf_for_mxfp8_param_ag")),
    Feature("FP4", _on("fp4", "fp4_param_gather"), _NO, _NO, "mpipe tune and mpipe memory predict it"),
    Feature("residuals in float32", _on("fp32_residual_connection"), _NO, _WARNS, "needs a GPU"),
    Feature("Transformer Engine", {"transformer_impl": ("transformer_engine",)}, _WARNS, _WARNS,
        "its Python is tested on CPUs, its kernels are not"),
    Feature("Transformer Engine's fused operations and grouped products of dense layers",
        _on("use_transformer_engine_op_fuser", "use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"), _NO,
        _NO),
    Feature("tensor and sequence parallelism", _on("sequence_parallel"), _YES, _YES),
    Feature("tensor-parallel communication within products", _on("tp_comm_overlap"), _NO, _NO),
    Feature("context parallelism", {"context_parallel_size": range(2, 2**20)}, _YES, _WARNS,
        "under launch it needs Transformer Engine"),
    Feature("hybrid context parallelism", _on("hybrid_context_parallel"), _NO, _NO),
    Feature("experts", _on("num_experts"), _YES, _YES, "with expert and data parallelism"),
    Feature("expert communication behind another microbatch", _on("overlap_moe_expert_parallel_comm"), _YES, _YES,
        "not with slices, --vocab-parallel, --offload"),
    Feature("experts with more tokens than others", _on("moe_load_factor"), _NO, _NO,
        "mpipe tune and mpipe memory predict it; in training routers decide"),
    Feature("tokens to experts by DeepEP or HybridEP", {"moe_token_dispatcher_type": ("flex",), "moe_enable_deepep": ()}, _NO,
        _WARNS, "needs a GPU"),
    Feature("shared experts behind communication", _on("moe_shared_expert_overlap"), _NO, _WARNS, "needs a GPU"),
    Feature("paged stash of experts", _on("moe_paged_stash"), _NO, _NO),
    Feature("multi-token prediction", _on("mtp_num_layers"), _YES, _YES, "not with tied embeddings"),
    Feature("multi-latent attention", _on("multi_latent_attention"), _NO, _WARNS,
        "needs Transformer Engine; mpipe tune and mpipe memory predict it",
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")),
    Feature("sparse attention (dsa)", {"experimental_attention_variant": ("dsa",)}, _NO, _NO,
        "--pipeline-schedule stock; mpipe tune and mpipe memory predict it",
        ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")),
    Feature("gated delta nets", {"experimental_attention_variant": ("gated_delta_net",)}, _NO, _WARNS,
        "needs a GPU; mpipe tune and mpipe memory predict it",
        ("linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
         "linear_num_key_heads", "linear_num_value_heads")),
    Feature("a gate for attention's output", _on("attention_output_gate"), _NO, _WARNS,
        "mpipe tune and mpipe memory predict it"),
    Feature("experts of narrow tokens", _on("moe_latent_size"), _NO, _WARNS,
        "needs Transformer Engine; mpipe tune and mpipe memory predict it"),
    Feature("other attention variants",
        _on("experimental_attention_variant", "window_size", "window_attn_skip_freq", "no_rope_freq"), _NO, _WARNS),
    Feature("attention sinks", {"softmax_type": ("off-by-one", "learnable")}, _NO, _WARNS),
    Feature("layers of different shapes", _on("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
        _NO, _WARNS),
    Feature("maximal update parametrization", _on("use_mup"), _NO, _WARNS, "not with --vocab-parallel"),
    Feature("distributed optimizer, both overlaps", _on("use_distributed_optimizer"), _YES, _YES),
    Feature("optimizers: Adam, SGD", {"optimizer": ("adam", "sgd")}, _YES, _YES),
    Feature("optimizers: Muon, Lion, SOAP", {"optimizer": ("muon", "dist_muon", "adaptive_muon", "lion", "soap")}, _NO, _WARNS),
    Feature("several instances of the distributed optimizer", {"num_distributed_optimizer_instances": range(2, 2**20)}, _NO,
        _WARNS),
    Feature("precision-aware optimizer", _on("use_precision_aware_optimizer"), _NO, _WARNS,
        details=("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
    Feature("optimizer in host memory", _on("optimizer_cpu_offload"), _NO, _WARNS, details=("optimizer_offload_fraction",)),
    Feature("FSDP, of torch or of Megatron", _on("use_torch_fsdp2", "use_megatron_fsdp"), _NO, _NO),
    Feature("weights gathered again", _on("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"), _NO,
        _NO),
    Feature("CUDA graphs",
        _on("cuda_graph_impl", "cuda_graph_scope", "enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"), _NO,
        _NO),
    Feature("recomputation, selective and full", _on("recompute_granularity"), _YES, _YES),
    Feature("activations in host memory, by layer", {"cpu_offloading_num_layers": range(1, 2**20)}, _NO, _WARNS,
        "--offload, by schedule"),
    Feature("activations in host memory, by module", _on("fine_grained_activation_offloading"), _NO, _NO,
        "--offload, by schedule"),
    Feature("deferred embedding gradients", _on("defer_embedding_wgrad_compute"), _NO, _NO, "--vocab-parallel",
        ("wgrad_deferral_limit",)),
    Feature("choice of kernels: attention, cross entropy, sums of gradients",
        {"attention_backend": ("flash", "fused", "unfused", "local")}, _NO, _WARNS, "mpipe tune and mpipe memory predict it",
        ("attention_softmax_in_fp32", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "grad_reduce_in_bf16")),
    Feature("delayed weight gradients", _on("delay_wgrad_compute"), _NO, _NO, "W passes are that"),
    Feature("dropout", {"hidden_dropout": (), "attention_dropout": ()}, _YES, _YES, "launch: not in slices, nor with passes R"),
    Feature("packed sequences (--sft)", _on("sft", "dataloader_inter_document_masking"), _NO, _WARNS),
    Feature("attention and positions reset at documents' ends", _on("reset_attention_mask"), _YES, _YES,
        "on every stage; Transformer Engine's attention ignores it, with a warning"),
    Feature("fine-tuning from weights alone", _on("finetune"), _YES, _YES),
    Feature("frozen layers", _on("freeze_all_layers"), _NO, _WARNS),
    Feature("distillation, from a teacher or from saved logits",
        _on("export_kd_teacher_load", "logits_load_dir", "logits_save_dir"), _NO, _WARNS, "not with --vocab-parallel"),
    Feature("reinforcement learning", _on("perform_rl_step"), _NO, _NO, "--pipeline-schedule stock"),
    Feature("rampup of the batch size", _on("rampup_batch_size"), _YES, _YES, "launch: ignored by megatron-core from 0.18 on"),
    Feature("batch size by steps", _on("step_batch_size_schedule"), _NO, _WARNS, "--rampup-batch-size"),
    Feature("in-process restart", _on("inprocess_restart"), _NO, _NO),
    Feature("a YAML file in place of flags", _on("yaml_cfg"), _NO, _NO, "--config FILE"),
    Feature("hybrid models, with Mamba-2 layers", _on("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model"), _NO,
        _NO, "--pipeline-schedule stock; mpipe tune and mpipe memory predict it",
        ("hybrid_attention_ratio", "hybrid_mlp_ratio", *(f"mamba_{name}" for name in ("state_dim", "head_dim", "num_groups",
         "num_heads")))),
    Feature("models on the meta device", _on("init_model_with_meta_device"), _NO, _NO),
    Feature("legacy models", _on("use_legacy_models"), _NO, _NO),
)  # fmt: skip


def untested(args: Namespace) -> list[Feature]:
    """The features that these flags of Megatron-LM, as parsed, switch on, and that the launch accepts untested."""
    return [feature for feature in FEATURES if feature.launch is Support.UNTESTED and feature.is_on(args)]


def of_flag(flag: str) -> Feature | None:
    """The feature to which a flag belongs that ``pretrain_gpt.py`` does not have; None for flags that the table does not know.

    Args:
        flag: without the dashes before it: a setting of the feature, or a switch with more words, as ``fp8-format``.
    """
    given = flag.replace("-", "_")

    def has(feature: Feature) -> bool:
        names = feature.names.items()
        return given in feature.details or any(
            given == name or (not values and given.startswith(f"{name}_")) for name, values in names
        )

    return next((feature for feature in FEATURES if feature.trainer is Support.REFUSED and has(feature)), None)


def unsupported(flag: str) -> str:
    """Words about a flag of Megatron-LM that ``pretrain_gpt.py`` does not train with."""
    feature = of_flag(flag.lstrip("-"))
    if feature is None:
        return f"unknown flag {flag}; --help lists all flags, and mpipe launch runs Megatron-LM's own script with its flags"
    if feature.launch is Support.REFUSED:
        what = "does not work with our schedules: leave it out" + (f" ({feature.note})" if feature.note else "")
    else:
        runs = f"mpipe launch runs Megatron-LM's own script with it ({feature.launch}: mpipe support)"
        what = f"is not in this project's pretrain_gpt.py: {runs}"
    return f"{flag} ({feature.title}) {what}"
