"""The training loop: iterations, evaluations, checkpoints, and the ways to stop."""

from __future__ import annotations

import gc
import signal
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.utils import Split
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.timers import Timers

from megatron.pipeline.model import random
from megatron.pipeline.runtime.device import this_device
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.replan import Steps
from megatron.pipeline.runtime.report import Report
from megatron.pipeline.training import checkpoint
from megatron.pipeline.training.data import Batch, Samples, evaluates, forward_step
from megatron.pipeline.training.logging import Log, Measured, Step
from megatron.pipeline.training.planning import replanning
from megatron.pipeline.training.state import Training
from megatron.pipeline.training.trace import write_trace

Iterators = list[Iterator[Batch] | None]


def train(args: Namespace, training: Training, samples: Samples, pipeline: Pipeline, log: Log, timers: Timers | None) -> None:
    """Train until ``--train-iters``, or until SIGTERM, ``--exit-interval`` or ``--exit-duration-in-mins`` stops it."""
    started = time.monotonic()
    with _termination_signal() as terminated, _quick_garbage_collection():
        log.resume(training.iteration)
        saved_at = training.iteration if args.load else None
        reason = ""
        profiling = replanning(args, pipeline)
        for step in _steps(args, training, samples):
            report = _report(args, step, pipeline, log, timers, always=profiling is not None)
            if profiling is not None and report is not None:
                profiling = _go_on(profiling, report, log)
            if evaluates(args) and training.iteration % args.eval_interval == 0:
                _evaluate_split(args, training, samples, Split.valid, log)
            if args.save and args.save_interval and training.iteration % args.save_interval == 0:
                saved_at = _save(args, training, log)
            reason = _reason_to_stop(args, training.iteration, started, terminated())
            if reason:
                log.line(f" stopping after iteration {training.iteration}: {reason}")
                break

        if args.save and saved_at != training.iteration:
            _save(args, training, log)
        if evaluates(args) and not reason:
            if training.iteration % args.eval_interval:
                _evaluate_split(args, training, samples, Split.valid, log)
            _evaluate_split(args, training, samples, Split.test, log)


def _steps(args: Namespace, training: Training, samples: Samples) -> Iterator[Step]:
    """Train one iteration after another until ``--train-iters``; a checkpoint may already be there."""
    if training.iteration >= args.train_iters:
        return
    with samples.microbatches(Split.train, training.consumed_samples) as data:
        assert data is not None, "the training split is never empty: check_data saw to it"
        while training.iteration < args.train_iters:
            yield train_step(args, training, data)


def train_step(args: Namespace, training: Training, data: Iterators) -> Step:
    """One iteration: forwards and backwards under the schedule, the optimizer's step, the next learning rate.

    The loss in the result is that of the rank with the last stage, and not a number elsewhere.
    """
    began = time.perf_counter()
    update_num_microbatches(training.consumed_samples, consistency_check=True)
    batch = get_current_global_batch_size()
    for chunk in training.chunks:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    random.set_iteration(training.chunks, training.iteration)
    reports = _forward_backward(args, training, data, get_num_microbatches(), forward_only=False)
    successful, grad_norm, _ = training.optimizer.step()
    learning_rate = get_canonical_lr_for_logging(training.optimizer.param_groups)
    if successful:
        training.scheduler.step(increment=batch)
    training.iteration += 1
    training.consumed_samples += batch
    return Step(
        iteration=training.iteration,
        consumed_samples=training.consumed_samples,
        batch=batch,
        loss=_mean(_total(reports)),
        grad_norm=float(grad_norm) if successful and grad_norm is not None else None,
        learning_rate=learning_rate or 0.0,
        loss_scale=float(training.optimizer.get_loss_scale()),
        seconds=time.perf_counter() - began,
    )


def evaluate(args: Namespace, training: Training, data: Iterators) -> float:
    """The mean loss over ``--eval-iters`` iterations under the training's schedule; NaN away from the last stage."""
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    timers, training.config.timers = training.config.timers, None
    for chunk in training.chunks:
        chunk.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for _ in range(args.eval_iters):
            total = total + _total(_forward_backward(args, training, data, microbatches, forward_only=True)).cpu()
    for chunk in training.chunks:
        chunk.train()
    training.config.timers = timers
    return _mean(total)


def _forward_backward(
    args: Namespace, training: Training, data: Iterators, microbatches: int, *, forward_only: bool
) -> list[dict[str, torch.Tensor]]:
    """The schedule's own function, called as Megatron-LM calls it."""
    reports: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=partial(forward_step, check_for_nan=args.check_for_nan_in_loss_and_grad),
        data_iterator=data if len(data) > 1 else data[0],
        model=training.chunks,
        num_microbatches=microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.seq_length,
        forward_only=forward_only,
    )
    return reports


def _total(reports: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Sum of losses and number of tokens over all data-parallel ranks; zeros away from the last stage."""
    if not reports:
        return torch.zeros(2)
    total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total


def _mean(total: torch.Tensor) -> float:
    loss, tokens = total.tolist()
    return loss / tokens if tokens else float("nan")


def _report(args: Namespace, step: Step, pipeline: Pipeline, log: Log, timers: Timers | None, always: bool) -> Report | None:
    """Log an iteration, with what was measured if that is wanted now."""
    logged = step.iteration % args.log_interval == 0
    wanted = always or args.metrics or args.tensorboard_dir or logged
    report = pipeline.report() if pipeline.measures and wanted else None
    measured = None
    if report and log.writes:
        measured = Measured(report.bubble_rate, pipeline.slowdown(report), report.peak_activation_bytes)
    log.step(step, measured)
    if args.pipeline_trace and logged and report and torch.distributed.get_rank() == 0:
        write_trace(args.pipeline_trace, step.iteration, pipeline, report)
    if timers is not None and logged:
        timers.log(list(timers._timers), normalizer=args.log_interval)
    return report


def _go_on(profiling: Steps, report: Report, log: Log) -> Steps | None:
    """One step of ``--pipeline-costs profile``; None when it was the last."""
    try:
        for line in profiling.send(report):
            log.line(line)
    except StopIteration:
        return None
    return profiling


def _evaluate_split(args: Namespace, training: Training, samples: Samples, split: Split, log: Log) -> None:
    """Evaluate on fresh samples: those of earlier evaluations are consumed, also across restarts."""
    earlier = (training.iteration - 1) // args.eval_interval if split is Split.valid else 0
    with samples.microbatches(split, earlier * args.eval_iters * args.global_batch_size) as data:
        if data is not None:
            name = {Split.valid: "validation", Split.test: "test"}[split]
            log.evaluation(name, training.iteration, evaluate(args, training, data))


def _save(args: Namespace, training: Training, log: Log) -> int:
    path = checkpoint.save(args, training)
    log.line(f" saved checkpoint {path}")
    return training.iteration


def _reason_to_stop(args: Namespace, iteration: int, started: float, terminated: bool) -> str:
    """Why training ends here, agreed between all ranks; empty to go on."""
    if args.exit_interval and iteration % args.exit_interval == 0:
        return f"--exit-interval {args.exit_interval}"
    late = bool(args.exit_duration_in_mins) and time.monotonic() - started > 60 * args.exit_duration_in_mins
    flags = torch.tensor([terminated, late], dtype=torch.int32, device=this_device())
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    anyone_terminated, anyone_late = flags.tolist()
    if anyone_terminated:
        return "SIGTERM"
    return f"--exit-duration-in-mins {args.exit_duration_in_mins:g}" if anyone_late else ""


@contextmanager
def _quick_garbage_collection() -> Iterator[None]:
    """Python's collector does not look at what exists now and stays until the end: modules, the model, the schedules.

    Looking through all of that takes a third of a second, in which one rank stops in the middle of a pass and all wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _termination_signal() -> Iterator[Callable[[], bool]]:
    """Note a SIGTERM instead of dying from it; yields a function that tells whether one came."""
    received = []

    def note(_signal: int, _frame: FrameType | None) -> None:
        received.append(True)

    before: Any = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, before)
