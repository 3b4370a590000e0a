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
    """Tokens to the first pipeline rank, labels to the last, nothing to others, and everything only if asked."""
    args = get_args()
    sequence = args.micro_batch_size, args.seq_length
    if mpu.get_tensor_model_parallel_rank() == 0:
        batch = {name: part.cuda() for name, part in next(data_iterator).items()}
    else:
        batch = {name: torch.zeros(sequence, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")}
        batch["loss_mask"] = torch.zeros(sequence)
        batch["attention_mask"] = torch.zeros(sequence[0], 1, sequence[1], sequence[1], dtype=torch.bool)
    if mtp_on_this_rank or args.pipeline_model_parallel_size == 1:
        wanted = set(batch)
    elif mpu.is_pipeline_first_stage():
        wanted = {"tokens", "position_ids", "attention_mask"}
    else:
        wanted = {"labels", "loss_mask", "attention_mask"} if mpu.is_pipeline_last_stage() else set()
    for name in sorted(batch):
        if name in wanted:
            source, group = mpu.get_tensor_model_parallel_src_rank(), mpu.get_tensor_model_parallel_group()
            torch.distributed.broadcast(batch[name], source, group=group)
        elif mpu.get_tensor_model_parallel_rank() > 0 and name != "attention_mask":
            batch[name] = None
    return batch


def logical_and_across_model_parallel_group(input):
    found = torch.tensor([int(input)], dtype=torch.int, device=torch.cuda.current_device())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN, group=mpu.get_model_parallel_group())
    return bool(found.item())


def reduce_max_stat_across_model_parallel_group(stat):
    found = torch.tensor([-1.0 if stat is None else stat], dtype=torch.float32, device=torch.cuda.current_device())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=mpu.get_model_parallel_group())
    return None if found.item() == -1.0 else found.item()
