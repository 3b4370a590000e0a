"""The model, and training it."""

import dataclasses

import torch
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.timers import Timers
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from megatron.training.global_vars import get_args, get_signal_handler, get_tensorboard_writer
from megatron.training.initialize import initialize_megatron
from megatron.training.utils import logical_and_across_model_parallel_group, reduce_max_stat_across_model_parallel_group


def get_model(model_provider_func, model_type=None, wrap_with_ddp=True, config=None, pg_collection=None):
    args = get_args()
    chunks = args.virtual_pipeline_model_parallel_size
    if chunks is None:
        ends = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        model = [model_provider_func(pre_process=ends[0], post_process=ends[1])]
    else:
        model = []
        for chunk in range(chunks):
            ends = (
                mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
                mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            )
            model.append(model_provider_func(pre_process=ends[0], post_process=ends[1], vp_stage=chunk))
    for part in model:
        for parameter in part.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if args.bf16 or args.fp16:
        model = [Float16Module(get_model_config(part), part) for part in model]
    return [DDP(get_model_config(part), _ddp(args), part, disable_bucketing=bool(number)) for number, part in enumerate(model)]


def _ddp(args):
    fields = [field.name for field in dataclasses.fields(DistributedDataParallelConfig)]
    given = {name: getattr(args, name) for name in fields if hasattr(args, name)}
    given |= {"bucket_size": args.ddp_bucket_size, "check_for_nan_in_grad": args.check_for_nan_in_loss_and_grad}
    return DistributedDataParallelConfig(**given)


def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func):
    args = get_args()
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    reports = forward_backward_func(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.seq_length,
        forward_only=False,
    )
    successful, norm, _ = optimizer.step()
    successful, norm = logical_and_across_model_parallel_group(successful), reduce_max_stat_across_model_parallel_group(norm)
    if successful:
        opt_param_scheduler.step(increment=args.global_batch_size)
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}, not successful, False, False, 0, norm, None
    total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return {"lm loss": total[0] / total[1]}, not successful, False, False, 0, norm, None


def train(forward_step_func, model, optimizer, opt_param_scheduler, data_iterator, config):
    args = get_args()
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync
        if args.align_grad_reduce:
            config.grad_sync_func = [chunk.start_grad_sync for chunk in model] if len(model) > 1 else model[0].start_grad_sync
    step = get_forward_backward_func()
    for iteration in range(args.train_iters):
        args.curr_iteration = iteration
        train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, step)
        args.consumed_train_samples += args.global_batch_size
        if checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration + 1):
            break
    if writer := get_tensorboard_writer():
        writer.flush()


def checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration):
    args = get_args()
    told = torch.tensor(int(args.exit_signal_handler and get_signal_handler()._signal_received))
    torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
    if told:
        save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
        return True
    if args.save_interval and iteration % args.save_interval == 0:
        save_checkpoint(iteration, model, optimizer, opt_param_scheduler)
    return bool(args.exit_interval and iteration % args.exit_interval == 0)


def pretrain(datasets_provider, model_provider, forward_step_func, weights=None):
    initialize_megatron()
    args = get_args()
    args.consumed_train_samples = 0
    model = get_model(model_provider)
    if weights:
        weights(model)
    shared = {name: getattr(args, name) for name in ("bf16", "fp16", "use_distributed_optimizer", "overlap_param_gather")}
    shared |= {name: getattr(args, name) for name in ("clip_grad", "initial_loss_scale", "loss_scale_window", "hysteresis")}
    timers = get_model_config(model[0]).timers = Timers(args.timing_log_level, "minmax")
    shared |= {"timers": timers, "barrier_with_L1_time": True}  # by default, as --post-validation knows
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=args.lr, min_lr=args.lr, **shared), model)
    warmup = {"init_lr": 0.0, "lr_warmup_steps": (args.lr_warmup_iters or 0) * args.global_batch_size}
    decay = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 1, "wd_incr_style": "constant", "lr_decay_style": "constant"}
    lengths = {"max_lr": args.lr, "min_lr": args.lr, "lr_decay_steps": args.train_iters * args.global_batch_size}
    scheduler = OptimizerParamScheduler(optimizer, **warmup, **decay, **lengths)
    if args.load:
        load_checkpoint(model, optimizer, scheduler)
    iterators = [datasets_provider(chunk) for chunk in range(len(model))] if len(model) > 1 else datasets_provider()
    train(forward_step_func, model, optimizer, scheduler, iterators, get_model_config(model[0]))
