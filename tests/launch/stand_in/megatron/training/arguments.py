"""Flags, what follows from them, and the transformer's configuration."""

import argparse
import dataclasses
import os

import torch
from megatron.core.transformer import TransformerConfig
from megatron.training.global_vars import set_global_variables

from megatron.pipeline.flags import flags


def add_megatron_arguments(parser):
    flags.add_flags(parser, flags.MEGATRON)  # of the same names, and for a start of the same meaning
    parser.set_defaults(clip_grad=0.0)
    parser.add_argument("--use-mup", action="store_true")
    parser.add_argument("--no-align-grad-reduce", action="store_false", dest="align_grad_reduce")
    return parser


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_megatron_arguments(parser).parse_args()


def parse_and_validate_args(extra_args_provider=None):
    args = parse_args(extra_args_provider)
    validate_args(args)
    set_global_variables(args)
    return args


def validate_args(args, defaults={}):  # noqa: B006
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.data_parallel_size = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    args.check_for_nan_in_loss_and_grad &= not args.fp16
    args.ffn_hidden_size, args.kv_channels = 4 * args.hidden_size, args.hidden_size // args.num_attention_heads
    args.delay_wgrad_compute = False
    args.virtual_pipeline_model_parallel_size = None
    chunks = args.num_virtual_stages_per_pipeline_rank
    if args.pipeline_model_parallel_layout is None:
        assert args.num_layers % (args.pipeline_model_parallel_size * (chunks or 1)) == 0, "layers cannot be divided"
        args.virtual_pipeline_model_parallel_size = chunks


def core_transformer_config_from_args(args, config_class=None):
    values = {
        field.name: getattr(args, field.name) for field in dataclasses.fields(TransformerConfig) if hasattr(args, field.name)
    }
    values |= {"pipeline_dtype": args.params_dtype, "deallocate_pipeline_outputs": True, "batch_p2p_sync": False}
    values |= {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "aux_loss", "num_query_groups": None}
    values |= {"num_moe_experts": args.num_experts, "add_bias_linear": args.add_bias_linear}
    values |= {"overlap_p2p_comm": args.virtual_pipeline_model_parallel_size is not None}
    values["batch_p2p_comm"] = not values["overlap_p2p_comm"]
    return TransformerConfig(**values)
