"""From flags to the configuration objects of megatron-core."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from dataclasses import fields
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import gelu, silu

from megatron.pipeline.flags.validation import batch_sizes
from megatron.pipeline.model.layout import PlacementLayout, stage_layers
from megatron.pipeline.planner import Placement


def params_dtype(args: Namespace) -> torch.dtype:
    """The type of weights and activations."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


def transformer_config(args: Namespace, placement: Placement) -> TransformerConfig:
    """The model's configuration, cut by a placement; ``args`` must have gone through ``validate``.

    Fused kernels are off where they cannot run: all of them without a GPU, apex's where apex is not installed.
    """
    cuda = torch.cuda.is_available()
    interleaved = placement.chunks > 1
    gradient_fusion = args.gradient_accumulation_fusion and cuda and _installed("fused_weight_gradient_mlp_cuda")
    values = _shared_fields(args, TransformerConfig) | {
        "params_dtype": params_dtype(args),
        "pipeline_dtype": params_dtype(args),
        "virtual_pipeline_model_parallel_size": placement.chunks if interleaved else None,
        "pipeline_model_parallel_layout": PlacementLayout(stage_layers(args, placement), placement),
        "account_for_embedding_in_pipeline_split": False,  # the layout has taken account of both
        "account_for_loss_in_pipeline_split": False,
        "deallocate_pipeline_outputs": can_free_outputs(placement.chunks),
        # Only megatron-core's interleaved schedule reads these: with two ranks it needs separate sends and receives.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "batch_p2p_sync": cuda,
        "barrier_with_L1_time": not args.steps.ahead,  # timers would make all ranks wait for each other
        "use_cpu_initialization": args.use_cpu_initialization or not cuda,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "num_moe_experts": args.num_experts,
        "moe_router_load_balancing_type": _one_or_all(args.moe_router_load_balancing_type),
        "moe_aux_loss_coeff": _one_or_all(args.moe_aux_loss_coeff),
        "add_qkv_bias": args.add_qkv_bias or args.add_bias_linear,
        "gated_linear_unit": args.swiglu,
        "activation_func": _activation(args),
        "masked_softmax_fusion": args.masked_softmax_fusion and cuda and _installed("scaled_masked_softmax_cuda"),
        "bias_activation_fusion": cuda and _bias_activation_fusion(args),
        "bias_dropout_fusion": args.bias_dropout_fusion and cuda,
        "apply_rope_fusion": args.apply_rope_fusion and cuda and _installed("transformer_engine"),
        "persist_layer_norm": not args.no_persist_layer_norm and cuda and args.transformer_impl == "transformer_engine",
        "gradient_accumulation_fusion": gradient_fusion,
    }
    config = TransformerConfig(**values | {"overlap_moe_expert_parallel_comm": False})
    # Its constructor would demand several chunks per rank, which only megatron-core's own order of passes needs.
    config.overlap_moe_expert_parallel_comm = args.overlap_moe_expert_parallel_comm
    return config


def can_free_outputs(chunks: int) -> bool:
    """Tell whether megatron-core's schedules may free what they send: the interleaved one does so while gloo is still sending
    it.
    """
    return torch.cuda.is_available() or chunks == 1


def optimizer_config(args: Namespace) -> OptimizerConfig:
    return OptimizerConfig(**_shared_fields(args, OptimizerConfig) | {"params_dtype": params_dtype(args)})


def parameter_scheduler(args: Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay. It counts samples, like Megatron's: a ramp-up slows it down."""
    samples = args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=int(args.lr_warmup_iters * samples),
        lr_decay_steps=args.lr_decay_iters * samples,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.train_iters * samples,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=args.lr_wsd_decay_iters * samples if args.lr_wsd_decay_iters else None,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def microbatch_counts(args: Namespace) -> list[int]:
    """Every number of microbatches that an iteration of this training can have."""
    return [size // (args.micro_batch_size * args.data_parallel_size) for size in batch_sizes(args)]


def _shared_fields(args: Namespace, config: type) -> dict[str, Any]:
    """The flags with the names of fields of a megatron-core configuration."""
    return {field.name: getattr(args, field.name) for field in fields(config) if hasattr(args, field.name)}


def _one_or_all(values: list[Any]) -> Any:
    """The value of a list with one element, or the list: megatron-core takes a list of several values only."""
    return values if len(values) > 1 else values[0]


def _activation(args: Namespace) -> Any:
    if args.squared_relu:
        from megatron.core.activations import squared_relu

        return squared_relu
    return silu if args.swiglu else gelu


def _bias_activation_fusion(args: Namespace) -> bool:
    if args.swiglu:
        return bool(args.bias_swiglu_fusion)
    return bool(args.bias_gelu_fusion and args.add_bias_linear and not args.squared_relu)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
