"""From flags to process groups."""

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.legacy import fused_kernels
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import get_args, set_global_variables


def initialize_megatron(extra_args_provider=None, args_defaults=None):
    assert torch.cuda.is_available(), "Megatron requires CUDA."
    args = parse_args(extra_args_provider)
    validate_args(args, args_defaults)
    set_global_variables(args)
    args = get_args()
    torch.distributed.init_process_group(args.distributed_backend, rank=args.rank, world_size=args.world_size)
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    seed = args.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    init_num_microbatches_calculator(args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
    fused_kernels.load(args)
