"""Short trainings whose gradients are tampered with on chosen stages in chosen iterations, and all that they leave behind."""

from __future__ import annotations

import hashlib
import os
import signal
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.pipeline.patches import schedules

from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.optimizer import step_ahead
from megatron.pipeline.runtime.optimizer.step_ahead import parts_of
from megatron.pipeline.trainer import loop, program
from megatron.pipeline.trainer.run_log import Log

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --lr 1e-2 --seed 7 "
    "--attention-dropout 0 --hidden-dropout 0 --clip-grad 100 --train-iters 12 --eval-iters 0 --num-workers 0 "
    "--tokenizer-type ByteLevelTokenizer --split 80,20,0 --lr-warmup-iters 3 --min-lr 1e-4"
)
POST = "--post-validation --post-validation-when always"

Injections = dict[int, tuple[int, float]]


def train(
    flags: str, injections: Injections, terminate_in: int | None = None
) -> tuple[list[tuple[Any, ...]], list[str], dict[str, int]]:
    """Train on this rank of the pool.

    Args:
        injections: by iteration, from 1: the pipeline rank, and what one of its gradients becomes before the step: not finite, or
            a thousandth of the number.
        terminate_in: the last rank gets a SIGTERM at the end of this iteration.

    Returns:
        Of every iteration what was told of it; digests of the parameters and of every part of the optimizer's state; and how many
        steps were taken ahead, how many of those were undone, and how many times forwards ran in vain.
    """
    schedules.restore()
    told: list[tuple[Any, ...]] = []
    digests: list[str] = []
    counts = {"ahead": 0, "undone": 0, "in vain": 0}
    real_build, real_train, real_resolve = program.build_training, loop.Loop.train, step_ahead.StepAhead.resolve
    real_abandon = Executor.abandon

    def build_training(*args: Any) -> Any:
        training = real_build(*args)
        _tamper(training, injections, terminate_in)
        return training

    def train(self: Any) -> None:
        real_train(self)
        digests.extend(_digests(self.training))

    def resolve(self: Any) -> Any:
        outcome = real_resolve(self)
        counts["ahead"] += 1
        counts["undone"] += outcome.rolled_back
        return outcome

    def abandon(self: Any) -> None:
        counts["in vain"] += 1
        real_abandon(self)

    def tell(self: Any, step: Any, _: Any) -> None:
        told.append((step.iteration, repr(step.loss), step.grad_norm, step.learning_rate, step.loss_scale, step.batch))

    with ExitStack() as stack:
        stack.enter_context(patch.object(program, "build_training", build_training))
        stack.enter_context(patch.object(loop.Loop, "train", train))
        stack.enter_context(patch.object(step_ahead.StepAhead, "resolve", resolve))
        stack.enter_context(patch.object(Executor, "abandon", abandon))
        stack.enter_context(patch.object(Log, "step", tell))
        stack.enter_context(patch.object(loop, "_quick_garbage_collection", nullcontext))  # see short_runs.train
        args, tokenizer, pipeline = program.prepare(f"{MODEL} {flags}".split(), torch.distributed.get_world_size())
        program.run(args, tokenizer, pipeline, guard=lambda *_, **__: nullcontext())
    return told, digests, counts


def error_of(flags: str, injections: Injections) -> str:
    """Train on this rank of the pool, and say how that failed; empty where it did not."""
    try:
        train(flags, injections)
    except RuntimeError as error:
        destroy_num_microbatches_calculator()
        return str(error)
    return ""


def _tamper(training: Any, injections: Injections, terminate_in: int | None) -> None:
    real = training.config.finalize_model_grads_func
    rank = parallel_state.get_pipeline_model_parallel_rank()

    def finalize(chunks: Any, *args: Any, **kwargs: Any) -> None:
        real(chunks, *args, **kwargs)
        if training.iteration + 1 == terminate_in and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        chosen, value = injections.get(training.iteration + 1, (None, 1.0))
        if chosen == rank:
            for parameter in chunks[-1].parameters():
                if getattr(parameter, "shared_embedding", False):
                    continue  # its copy on another stage has to stay the same
                parameter.main_grad.view(-1)[:1].fill_(1e-3 * value)

    training.config.finalize_model_grads_func = finalize


def _digests(training: Any) -> list[str]:
    for chunk in training.chunks if training.chunks[0].ddp_config.overlap_param_gather else ():
        chunk.start_param_sync(force_sync=True)  # gathers of the last step may be on their way
    found = [_digest(parameter) for chunk in training.chunks for parameter in chunk.parameters()]
    found += [_digest(buffer) for chunk in training.chunks for buffer in chunk.module.buffers()]
    for part in parts_of(training.optimizer):
        for group in part.optimizer.param_groups:
            found.append(repr({name: value for name, value in group.items() if name != "params"}))
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                found += [_digest(parameter), *(_digest(state[name]) for name in sorted(state))]
        if scaler := getattr(part, "grad_scaler", None):
            found.append(repr(scaler.state_dict()))
    return [*found, repr(training.scheduler.state_dict()), repr((training.iteration, training.consumed_samples))]


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return hashlib.sha256(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
