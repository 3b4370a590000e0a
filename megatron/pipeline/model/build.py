"""This rank's chunks of a model: built by its adapter, their linears split, wrapped for precision and DDP."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, float16_to_fp32, fp32_to_float16

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.model import te_linear
from megatron.pipeline.model.adapter import GPT, ModelAdapter
from megatron.pipeline.model.boundary import BoundaryModules
from megatron.pipeline.model.split_linear import split_chunks
from megatron.pipeline.model.stage import Stage
from megatron.pipeline.model.vocabulary.shard import shard_vocabulary
from megatron.pipeline.planner import STOCK, Placement

__all__ = ["build_model"]

logger = logging.getLogger(__name__)


def build_model(
    args: Namespace, config: TransformerConfig, placement: Placement, adapter: ModelAdapter = GPT
) -> list[DistributedDataParallel]:
    """Build this rank's chunks, in the order of their ``vp_stage``, each wrapped in megatron-core's DDP.

    With vocabulary parallelism the first chunk of every rank has a ``vocabulary`` (see ``vocabulary/shard.py``), the first stage
    takes its embeddings from there, and the last stage returns its hidden states [s, b, h] instead of losses.

    Sets ``config.finalize_model_grads_func``: it depends on the ranks of the first and the last stage.

    Args:
        args: flags by Megatron-LM's names (see ``flags/arguments.py``); the ones that TransformerConfig does not hold
            are read from here. With ``pipeline_schedule == "stock"`` nothing is split: upstream's backward runs as it is.
        config: the transformer's configuration; its ``pipeline_model_parallel_layout`` is for the same placement.
        placement: which rank and chunk holds which stage.
        adapter: of the kind of model.

    Process groups must be initialised; this is collective.
    """
    split = args.pipeline.schedule != STOCK
    if split and args.transformer_impl == "transformer_engine":
        te_linear.delay_weight_gradients(config)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = [Stage(placement, rank, chunk) for chunk in range(placement.chunks)]
    models = [adapter.build(args, config, stage) for stage in stages]
    sharded = args.vocabulary.spread
    if sharded:
        shard_vocabulary(args, config, models, stages)

    if split and (fused := split_chunks(models, args.pipeline.recompute_fused_backward)):
        logger.info(fused)

    for model in models:
        model.to(this_device())
    boundary = BoundaryModules(placement)
    boundary.tie(models)
    config.finalize_model_grads_func = boundary.finalize_model_grads if split else finalize_model_grads
    chunks: list[torch.nn.Module] = models
    if config.fp16 or config.bf16:
        chunks = [LowPrecision(config, model, stage, sharded) for model, stage in zip(models, stages, strict=True)]
    return [  # as Megatron-LM does; what is split is cut into buckets even so
        DistributedDataParallel(config, _ddp_config(args), chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


class LowPrecision(Float16Module):
    """megatron-core's fp16 or bf16 module, which converts the first stage's inputs and the last stage's losses, on any rank.

    With vocabulary parallelism the last stage returns hidden states, which stay in the model's precision.
    """

    def __init__(self, config: TransformerConfig, model: torch.nn.Module, stage: Stage, sharded: bool) -> None:
        super().__init__(config, model)
        self._stage = stage
        self._ends_in_loss = stage.last and not sharded

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        if self._stage.first:
            inputs = fp32_to_float16(inputs, self.float16_convertor)
        outputs = self.module(*inputs, **kwargs)
        return float16_to_fp32(outputs) if self._ends_in_loss and fp32_output else outputs


def _ddp_config(args: Namespace) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=args.check_for_nan_in_loss_and_grad,
        bucket_size=args.ddp_bucket_size,
    )
