"""Parts of a training run, and how it is put together."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.timers import Timers
from megatron.core.transformer import TransformerConfig
from megatron.pipeline.patches import compat, moe_utils

from megatron.pipeline.flags.config import optimizer_config, parameter_scheduler, transformer_config
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.model.build import build_model
from megatron.pipeline.planner import Placement


@dataclass
class Training:
    """Everything that a checkpoint holds, and the configuration that the model was built with.

    Attributes:
        chunks: this rank's part of the model, wrapped for data parallelism.
        iteration: how many iterations are done.
        consumed_samples: how many training samples they took, over all ranks.
    """

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    iteration: int = 0
    consumed_samples: int = 0


def build_training(args: Settings, placement: Placement, timers: Timers | None = None) -> Training:
    """Build the model, its optimizer and its schedule of learning rates. Process groups must exist."""
    # Upstream adds up auxiliary losses by layer in globals, for logs: from here on those of this model.
    moe_utils.exchange_auxiliary_losses()
    compat.get("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper.tracker").clear()
    config = transformer_config(args, placement)
    chunks = build_model(args, config, placement)
    optimizer = get_megatron_optimizer(optimizer_config(args), chunks)
    config.timers = timers
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap_grad_reduce:
        contexts = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
    return Training(config, chunks, optimizer, parameter_scheduler(args, optimizer))
