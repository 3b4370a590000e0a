"""Process groups of a training."""

from __future__ import annotations

from megatron.core import parallel_state

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.planner import Placement


def initialize_model_parallel(args: Settings, placement: Placement) -> None:
    """Make megatron-core's process groups; torch.distributed must be initialised."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=placement.chunks if placement.chunks > 1 else None,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
    )
