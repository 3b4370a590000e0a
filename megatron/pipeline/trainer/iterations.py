"""Training iterations: forwards and backwards under the schedule, the optimizer's step, the next learning rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches, update_num_microbatches
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.pipeline.distributed.device import to_device
from megatron.pipeline.distributed.reduction import Reduction
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.model import seeding
from megatron.pipeline.monitor.report import PendingReport
from megatron.pipeline.runtime.optimizer.post_validation import PostValidation
from megatron.pipeline.runtime.optimizer.snapshot import Keep
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.session.metrics import Step
from megatron.pipeline.trainer.data import Batch, check_finite, forward_step
from megatron.pipeline.trainer.state import Training

Iterators = list[Iterator[Batch] | None]
Losses = list[torch.Tensor]  # of microbatches
Stops = Callable[[], tuple[bool, bool]]


class Iterations:
    """Trains one iteration after another on one stream of data.

    Args:
        stops: says whether this rank has been asked to terminate, and whether its time is over.

    Attributes:
        stopped: what ``stops`` said on any rank after the last iteration.
    """

    def __init__(self, args: Settings, training: Training, pipeline: Pipeline, data: Iterators, stops: Stops) -> None:
        self._args, self._training, self._data, self._stops = args, training, data, stops
        when = args.steps.when if args.steps.ahead else None
        self._steps = PostValidation(pipeline, training.optimizer, when, Keep(args.steps.copy))
        self._next: tuple[dict[str, Any], Losses] | None = None
        self.stopped = False, False

    def run(self, follows: bool) -> tuple[Step, PendingReport | None, list[str]]:
        """One iteration; returns what it was, what was measured, and lines for the log.

        Args:
            follows: the next iteration is to follow at once.
        """
        began = time.perf_counter()
        keywords, losses = self._next or self._prepare()
        self._next = None
        try:
            return self._run(began, keywords, losses, follows)
        except Exception:
            check_finite(losses)  # from which the error may come, such as gradients that are not finite
            check_finite(self._next[1] if self._next else [])
            raise

    def _prepare(self) -> tuple[dict[str, Any], Losses]:
        """Keywords of the call of the next iteration, which notes losses: the host does not wait for each."""
        training, losses = self._training, Losses()
        update_num_microbatches(training.consumed_samples, consistency_check=True)
        seeding.set_iteration(training.chunks, training.iteration)
        check = losses.append if self._args.check_for_nan_in_loss_and_grad else None
        return schedule_call(self._args, training, self._data, get_num_microbatches(), check=check), losses

    def _run(
        self, began: float, keywords: dict[str, Any], losses: Losses, follows: bool
    ) -> tuple[Step, PendingReport | None, list[str]]:
        training, batch = self._training, get_current_global_batch_size()
        for chunk in training.chunks:
            chunk.zero_grad_buffer()
        training.optimizer.zero_grad()
        reports = get_forward_backward_func()(**keywords)
        total = _start_total(reports) if reports else None
        stops = to_device([*self._stops(), 0.0])
        if losses:
            stops[2] = torch.stack(losses).isfinite().logical_not_().any()
        training.iteration += 1
        training.consumed_samples += batch
        self._next = self._prepare() if follows else None
        taken = self._steps.step(self._next[0] if self._next else None, stops)
        terminated, late, not_finite = taken.stops
        if not_finite:
            check_finite(losses)
        self.stopped = bool(terminated), bool(late)
        if taken.anew and self._next:
            self._next[1].clear()
        step = Step(
            iteration=training.iteration,
            consumed_samples=training.consumed_samples,
            batch=batch,
            loss=_quotient(*total.wait()) if total else float("nan"),
            grad_norm=None if taken.grad_norm is None else float(taken.grad_norm),
            learning_rate=get_canonical_lr_for_logging(training.optimizer.param_groups) or 0.0,
            # Without fp16 it is 1, and asking for it would wait for the forwards that run ahead.
            loss_scale=float(training.optimizer.get_loss_scale()) if self._args.fp16 else 1.0,
            seconds=time.perf_counter() - began,
            step=taken.how,
        )
        if taken.successful:
            training.scheduler.step(increment=batch)
        return step, taken.report, [f" after iteration {training.iteration} {line}" for line in taken.lines]


def evaluate(args: Settings, training: Training, data: Iterators) -> float:
    """The mean loss over ``--eval-iters`` iterations under the training's schedule; NaN away from the last stage."""
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    timers, training.config.timers = training.config.timers, None
    for chunk in training.chunks:
        chunk.eval()
    losses: list[torch.Tensor] = []
    check = losses.append if args.check_for_nan_in_loss_and_grad else None
    total = torch.zeros(2)
    with torch.no_grad():
        for _ in range(args.eval_iters):
            call = schedule_call(args, training, data, microbatches, check=check, forward_only=True)
            reports = get_forward_backward_func()(**call)
            check_finite(losses)
            losses.clear()
            if reports:
                total += torch.tensor(_start_total(reports).wait())
    for chunk in training.chunks:
        chunk.train()
    training.config.timers = timers
    return _quotient(*total.tolist())


def schedule_call(
    args: Settings,
    training: Training,
    data: Iterators,
    microbatches: int,
    *,
    check: Callable[[torch.Tensor], None] | None,
    forward_only: bool = False,
) -> dict[str, Any]:
    """The keywords of the schedule's own function, which Megatron-LM calls so.

    It returns for every microbatch the sum of its losses and its number of tokens, on the rank with the last stage.
    """
    return {
        "forward_step_func": partial(forward_step, check=check),
        "data_iterator": data if len(data) > 1 else data[0],
        "model": training.chunks,
        "num_microbatches": microbatches,
        "seq_length": args.seq_length,
        "micro_batch_size": args.micro_batch_size,
        "decoder_seq_length": args.seq_length,
        "forward_only": forward_only,
    }


def _start_total(reports: list[dict[str, torch.Tensor]]) -> Reduction:
    """Sum of losses and number of tokens over all data-parallel ranks."""
    total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return Reduction(total, torch.distributed.ReduceOp.SUM, group)


def _quotient(loss: float, tokens: float) -> float:
    return loss / tokens if tokens else float("nan")
