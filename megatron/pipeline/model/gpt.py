"""megatron-core's GPT model, built for this rank: seeded per layer, its linears split, wrapped for precision and DDP."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import layers as upstream_layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron.pipeline.model import random
from megatron.pipeline.model.layer_spec import block_spec
from megatron.pipeline.model.split_linear import split_weights

logger = logging.getLogger(__name__)


def build_model(args: Namespace, config: TransformerConfig) -> list[DistributedDataParallel]:
    """Build this rank's chunks, in the order of their ``vp_stage``, each wrapped in megatron-core's DDP.

    Args:
        args: flags by Megatron-LM's names (see ``training/arguments.py``); the ones that TransformerConfig does not hold
            are read from here. With ``pipeline_schedule == "stock"`` nothing is split: upstream's backward runs as it is.
        config: the transformer's configuration.

    Process groups must be initialised.
    """
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)
    virtual = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    chunks = [_chunk(args, config, vp_stage) for vp_stage in stages]

    split = args.pipeline_schedule != "stock"
    if split:
        fused = [name for chunk in chunks for name in split_weights(chunk)]
        if fused:
            logger.info("backward is not split, runs fused in B: %s", "; ".join(fused))

    for chunk in chunks:
        chunk.to(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu")
    if config.fp16 or config.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    return [
        DistributedDataParallel(config, _ddp_config(args, split), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def _chunk(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> torch.nn.Module:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    tied = not args.untie_embeddings_and_output_weights
    model = random.SeededGPTModel(
        config=config,
        transformer_layer_spec=block_spec(args, config, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=first,
        post_process=last,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        seed=args.seed,
    )
    if last and not tied:
        _initialize_output_layer(model.output_layer, config, args.seed)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model


def _initialize_output_layer(output_layer: Any, config: TransformerConfig, seed: int) -> None:
    """Draw the output weights from a seed of their own, not from whatever the layers before them on this stage left."""
    random.seed_layer(random.weight_base(seed), config.num_layers + 1)
    weight, group = output_layer.weight, output_layer.tp_group
    if not config.use_cpu_initialization:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            config.init_method(weight)
        return
    upstream_layers._initialize_affine_weight_cpu(
        weight,
        output_layer.output_size,
        output_layer.input_size,
        output_layer.output_size_per_partition,
        partition_dim=0,
        init_method=config.init_method,
        params_dtype=config.params_dtype,
        rank=group.rank(),
        world_size=group.size(),
        skip_set_tensor_parallel_attributes=True,
    )


def _ddp_config(args: Namespace, split: bool) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
        bucket_size=args.ddp_bucket_size,
        # Weights whose gradients W computes report to DDP through their modules, after W.
        delay_wgrad_compute=split,
    )
