"""megatron-core's GPT model, built for this rank: seeded per layer, its linears split, wrapped for precision and DDP."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, float16_to_fp32, fp32_to_float16
from megatron.pipeline.patches import compat

from megatron.pipeline.dist.device import this_device
from megatron.pipeline.model import seeding, te_linear
from megatron.pipeline.model.boundary import Ends
from megatron.pipeline.model.layer_spec import block_spec, prediction_spec
from megatron.pipeline.model.split_linear import split_weights
from megatron.pipeline.model.stage import Stage
from megatron.pipeline.model.vocabulary.shard import spread_vocabulary
from megatron.pipeline.schedule.core.names import OFF, STOCK
from megatron.pipeline.schedule.core.placement import Placement

logger = logging.getLogger(__name__)


def build_model(args: Namespace, config: TransformerConfig, placement: Placement) -> list[DistributedDataParallel]:
    """Build this rank's chunks, in the order of their ``vp_stage``, each wrapped in megatron-core's DDP.

    With vocabulary parallelism the first chunk of every rank has a ``vocabulary`` (see ``vocabulary/shard.py``), the first stage
    takes its embeddings from there, and the last stage returns its hidden states [s, b, h] instead of losses.

    Sets ``config.finalize_model_grads_func``: how gradients are finalised depends on where the ends of the model are.

    Args:
        args: flags by Megatron-LM's names (see ``flags/arguments.py``); the ones that TransformerConfig does not hold
            are read from here. With ``pipeline_schedule == "stock"`` nothing is split: upstream's backward runs as it is.
        config: the transformer's configuration; its ``pipeline_model_parallel_layout`` is for the same placement.
        placement: which rank and chunk holds which stage.

    Process groups must be initialised; this is collective.
    """
    split = args.pipeline_schedule != STOCK
    if split and args.transformer_impl == "transformer_engine":
        te_linear.delay_weight_gradients(config)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = [Stage(placement, rank, chunk) for chunk in range(placement.chunks)]
    models = [_model(args, config, stage) for stage in stages]
    spread = args.vocab_parallel != OFF
    if spread:
        spread_vocabulary(args, config, models, stages)

    if split:
        fused = [
            name if len(models) == 1 else f"chunk {chunk}: {name}"  # layers count from 0 in every chunk
            for chunk, model in enumerate(models)
            for name in split_weights(model, args.recompute_fused_backward)
        ]
        if fused:
            logger.info("backward is not split, runs fused in B: %s", "; ".join(fused))

    for model in models:
        model.to(this_device())
    ends = Ends(placement)
    ends.tie(models)
    config.finalize_model_grads_func = ends.finalize_model_grads if split else finalize_model_grads
    chunks: list[torch.nn.Module] = models
    if config.fp16 or config.bf16:
        chunks = [LowPrecision(config, model, stage, spread) for model, stage in zip(models, stages, strict=True)]
    return [
        DistributedDataParallel(config, _ddp_config(args, split), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


class LowPrecision(Float16Module):
    """megatron-core's fp16 or bf16 module, which converts what enters the first and leaves the last stage; wherever they are.

    With the vocabulary spread over all ranks, what leaves the last stage is not the loss but goes on in the model's precision.
    """

    def __init__(self, config: TransformerConfig, model: torch.nn.Module, stage: Stage, spread: bool) -> None:
        super().__init__(config, model)
        self._stage = stage
        self._ends_in_loss = stage.last and not spread

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        if self._stage.first:
            inputs = fp32_to_float16(inputs, self.float16_convertor)
        outputs = self.module(*inputs, **kwargs)
        return float16_to_fp32(outputs) if self._ends_in_loss and fp32_output else outputs


def _model(args: Namespace, config: TransformerConfig, stage: Stage) -> torch.nn.Module:
    spread = args.vocab_parallel != OFF
    tied = not args.untie_embeddings_and_output_weights and not spread
    model = seeding.SeededGPTModel(
        config=config,
        transformer_layer_spec=block_spec(args, config, stage.vp_stage),
        mtp_block_spec=prediction_spec(args, config, stage.vp_stage),
        # What spread_vocabulary replaces is as small as can be.
        vocab_size=config.tensor_model_parallel_size if spread else args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=stage.first,
        post_process=stage.last,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=stage.vp_stage,
        seed=args.seed,
    )
    if stage.last and not tied and not spread:
        _initialize_output_layer(model.output_layer, config, args.seed)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model


def _initialize_output_layer(output_layer: Any, config: TransformerConfig, seed: int) -> None:
    """Draw the output weights from a seed of their own, not from whatever the layers before them on this stage left."""
    seeding.seed_layer(seeding.weight_base(seed), seeding.output_layer(config))
    weight, group = output_layer.weight, output_layer.tp_group
    if not config.use_cpu_initialization:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            config.init_method(weight)
        return
    compat.get("megatron.core.tensor_parallel.layers", "_initialize_affine_weight_cpu")(
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
