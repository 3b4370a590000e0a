"""Flags, what follows from them, and the transformer's configuration."""

import argparse
import dataclasses
import os

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.pipeline.flags import flags

SWITCHES = (
    "--sft --exit-signal-handler "
    "--use-mup --delay-wgrad-compute --tp-comm-overlap --overlap-param-gather-with-optimizer-step --defer-embedding-wgrad-compute"
).split()


def add_megatron_arguments(parser):
    flags.add_flags(parser, flags.MEGATRON)  # of the same names, and for a start of the same meaning
    parser.set_defaults(clip_grad=0.0)
    parser.add_argument("--ckpt-format", choices=["torch", "torch_dist"])
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--wandb-project", default="")
    for switch in SWITCHES:
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--no-align-grad-reduce", action="store_false", dest="align_grad_reduce")
    parser.add_argument("--timing-log-level", type=int, default=0, choices=range(3))
    parser.add_argument("--wgrad-deferral-limit", type=int, default=0)
    parser.add_argument("--cuda-graph-impl", default="none", choices=["none", "local", "transformer_engine"])
    parser.add_argument("--cuda-graph-scope", nargs="+", default=[])
    return parser


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    return add_megatron_arguments(parser).parse_args()


def validate_args(args, defaults={}):  # noqa: B006
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args.data_parallel_size = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    args.check_for_nan_in_loss_and_grad &= not args.fp16
    args.ffn_hidden_size = args.ffn_hidden_size or 4 * args.hidden_size
    if args.num_experts:
        args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    args.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    args.sequence_parallel &= args.tensor_model_parallel_size > 1
    layers, chunks, layout = (getattr(args, name) for name in flags.CHUNK_FLAGS)
    assert (layers, chunks, layout).count(None) >= 2, "no more than one of the flags about chunks"
    ends = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    counted = args.num_layers + ends
    if layout is not None:
        chunks = PipelineParallelLayerLayout.get_num_stages_from_str(layout) // args.pipeline_model_parallel_size
    elif layers is not None:
        chunks = counted // (args.pipeline_model_parallel_size * layers)
    if layout is None:
        assert counted % (args.pipeline_model_parallel_size * (chunks or 1)) == 0, "layers cannot be divided"
    args.virtual_pipeline_model_parallel_size = chunks if chunks and chunks > 1 else None


def core_transformer_config_from_args(args, config_class=None):
    values = {
        field.name: getattr(args, field.name) for field in dataclasses.fields(TransformerConfig) if hasattr(args, field.name)
    }
    values |= {"pipeline_dtype": args.params_dtype, "deallocate_pipeline_outputs": True, "batch_p2p_sync": False}
    [kind], [coefficient] = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    values |= {"moe_aux_loss_coeff": coefficient, "moe_router_load_balancing_type": kind}
    values |= {"num_query_groups": args.num_query_groups if args.group_query_attention else None}
    if args.swiglu:
        values |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
    values |= {"num_moe_experts": args.num_experts, "add_bias_linear": args.add_bias_linear}
    values |= {"overlap_p2p_comm": args.virtual_pipeline_model_parallel_size is not None}
    values["batch_p2p_comm"] = not values["overlap_p2p_comm"]
    return TransformerConfig(**values)
