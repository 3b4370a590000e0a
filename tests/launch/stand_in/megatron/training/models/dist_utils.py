"""All chunks of a rank, built by one function for each and wrapped."""

from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module


def unimodal_build_distributed_models(
    build_model_func, transformer_config, pg_collection, ddp_config=None, mixed_precision_wrapper=Float16Module
):
    model = []
    for chunk in range(transformer_config.virtual_pipeline_model_parallel_size or 1):
        number = None if transformer_config.virtual_pipeline_model_parallel_size is None else chunk
        first = mpu.is_pipeline_first_stage(ignore_virtual=number is None, vp_stage=number)
        last = mpu.is_pipeline_last_stage(ignore_virtual=number is None, vp_stage=number)
        model.append(build_model_func(pg_collection, pre_process=first, post_process=last, vp_stage=number))
    for part in model:
        for parameter in part.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if transformer_config.bf16:
        model = [mixed_precision_wrapper(transformer_config, part) for part in model]
    return [DDP(transformer_config, ddp_config, part, disable_bucketing=bool(number)) for number, part in enumerate(model)]
