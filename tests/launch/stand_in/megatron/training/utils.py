"""Which ranks read data, and how tensor-parallel ranks share it."""

import torch
from megatron.core import mpu
from megatron.training.global_vars import get_args


def is_first_or_last_pipeline_stage(vp_stage):
    ignore = vp_stage is None
    return mpu.is_pipeline_first_stage(ignore_virtual=ignore, vp_stage=vp_stage) or mpu.is_pipeline_last_stage(
        ignore_virtual=ignore, vp_stage=vp_stage
    )


def get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=False):
    """Tokens to the first pipeline rank, labels to the last, everything only if asked."""
    args = get_args()
    shape = args.micro_batch_size, args.seq_length
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = {name: part.cuda() for name, part in next(data_iterator).items()}
    else:
        batch = {name: torch.empty(shape, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")}
        batch["loss_mask"] = torch.empty(shape)
    everything = mtp_on_this_rank or args.pipeline_model_parallel_size == 1
    for name in batch:
        if everything or (
            name in ("tokens", "position_ids") if mpu.is_pipeline_first_stage() else name in ("labels", "loss_mask")
        ):
            source, group = mpu.get_tensor_model_parallel_src_rank(), mpu.get_tensor_model_parallel_group()
            torch.distributed.broadcast(batch[name], source, group=group)
        elif mpu.get_tensor_model_parallel_rank() > 0:
            batch[name] = None
    return batch
