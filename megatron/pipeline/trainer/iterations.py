"""Training iterations: forwards and backwards under the schedule, the optimizer's step, the next learning rate.

With ``--post-validation`` a step may be taken before the validation of its gradients. It stays provisional until the next
iteration's ``Validate``, which accepts it or rolls it back, and logs it.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size, get_num_microbatches, update_num_microbatches
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.pipeline.dist.device import to_device
from megatron.pipeline.dist.reduction import Reduction
from megatron.pipeline.model import seeding
from megatron.pipeline.optimizer.policy import Observation, Policy
from megatron.pipeline.optimizer.snapshot import Keep
from megatron.pipeline.optimizer.step_ahead import Outcome, StepAhead, clips, snapshot_of
from megatron.pipeline.record.report import PendingReport
from megatron.pipeline.runtime.iteration import ValidationResult
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.session.metrics import Step
from megatron.pipeline.trainer.data import Batch, check_finite, forward_step
from megatron.pipeline.trainer.state import Training

Iterators = list[Iterator[Batch] | None]
Tell = Callable[[Step, PendingReport | None, list[str]], None]
Stops = Callable[[], tuple[bool, bool]]


@dataclass
class _Open:
    """An iteration whose passes and step are done, but whose step may be provisional or whose loss is still being sent.

    Attributes:
        ahead: whether the step was taken before the validation of its gradients.
        outcome: of the step; waits for it where it was taken ahead.
        batch: samples of the iteration, over all ranks.
        seconds: of the iteration.
        ended: when its step had been taken, by this rank's clock.
        loss: sum of the losses and number of tokens, over the data-parallel ranks; None away from the last stage.
        report: what was measured.
        losses: of this rank's microbatches, to be checked.
        agreed: the largest in the world: terminated, late, whether a loss is not finite, bytes of the copy, seconds and wasted
            seconds per microbatch (see ``Observation``).
        before: whether the step before was ahead, and accepted; None where the time of this iteration does not depend on that.
    """

    ahead: bool
    outcome: Callable[[], Outcome]
    batch: int
    seconds: float
    ended: float
    loss: Reduction | None
    report: PendingReport | None
    losses: list[torch.Tensor]
    agreed: Reduction
    before: tuple[bool, bool] | None


class Iterations:
    """Trains one iteration after another on one stream of data.

    Args:
        stops: says whether this rank has been asked to terminate, and whether its time is over.
        tell: called on every rank when an iteration is resolved: with what it was, what was measured, and lines for the log.

    Attributes:
        stopped: what ``stops`` said on any rank after the last iteration that is resolved.
    """

    def __init__(
        self, args: Namespace, training: Training, pipeline: Pipeline, data: Iterators, stops: Stops, tell: Tell
    ) -> None:
        self._args, self._training, self._pipeline, self._data = args, training, pipeline, data
        self._stops, self._tell = stops, tell
        self._policy = Policy(args.post_validation_when == "always") if args.post_validation else None
        self._snapshot = snapshot_of(training.optimizer, Keep(args.post_validation_copy)) if self._policy else None
        self._open: _Open | None = None
        self._losses: list[torch.Tensor] = []  # of the microbatches so far
        self._last: tuple[float, tuple[bool, bool]] | None = None  # when the last step was taken, and its fate
        self._wasted = 0.0
        self._copied = 0.0  # the most bytes that copies have taken on a rank
        self.stopped = False, False

    def run(self, may_be_ahead: bool) -> bool:
        """One iteration; returns whether all that it does is done. It is not where its step was taken ahead.

        If training is to stop after the iteration before, which was still open, this one does not take place.

        Args:
            may_be_ahead: the next iteration is to follow at once.
        """
        began = time.perf_counter()
        if self._open:
            began = self._open.ended
        elif self._policy and self._last:
            began, _ = self._last
        update_num_microbatches(self._training.consumed_samples, consistency_check=True)
        batch, microbatches = get_current_global_batch_size(), get_num_microbatches()
        seeding.set_iteration(self._training.chunks, self._training.iteration)
        if self._open is None:
            self._clear_gradients()
        try:
            with self._pipeline.validating(self._resolve) if self._open else nullcontext():
                # Losses are checked together: the host does not wait for each.
                check = self._losses.append if self._args.check_for_nan_in_loss_and_grad else None
                reports = run_schedule(self._args, self._training, self._data, microbatches, check=check)
        except Exception:
            check_finite(self._losses)  # from which the error may come, such as gradients that are not finite
            raise
        if any(self.stopped):
            return True
        self._open = done = self._step(reports, began, batch, microbatches, may_be_ahead)
        if done.ahead:
            return False
        self._resolve()
        if not may_be_ahead:
            self._last = None
        return True

    def _step(self, reports: list[dict[str, torch.Tensor]], began: float, batch: int, microbatches: int, may: bool) -> _Open:
        """Take the optimizer's step and start all that is to be known of the iteration."""
        training = self._training
        ahead = bool(may and self._policy and self._policy.ahead)
        outcome = StepAhead(training.optimizer, self._snapshot).resolve if ahead else self._plain_step()
        ended = time.perf_counter()
        costs = [seconds / microbatches for seconds in (ended - began, self._wasted)]
        copied = self._snapshot.bytes if self._snapshot else 0
        losses, self._losses = self._losses, []
        agreed = to_device([*self._stops(), 0.0, copied, *costs])
        if losses:
            agreed[2] = torch.stack(losses).isfinite().logical_not_().any()
        training.iteration += 1
        training.consumed_samples += batch
        return _Open(
            ahead=ahead,
            outcome=outcome,
            batch=batch,
            seconds=ended - began,
            ended=ended,
            loss=_start_total(reports) if reports else None,
            report=self._pipeline.start_report() if self._pipeline.measures else None,
            losses=losses,
            agreed=Reduction(agreed, torch.distributed.ReduceOp.MAX),
            before=self._last[1] if self._last else None,
        )

    def _plain_step(self) -> Callable[[], Outcome]:
        if self._snapshot is not None:
            self._snapshot.ready()
            self._snapshot.release()
        successful, norm, _ = self._training.optimizer.step()
        return lambda: Outcome(successful, norm, rolled_back=False)

    def _resolve(self) -> ValidationResult:
        """Wait for what is still on its way of the open iteration, make the parameters what they must be, and tell of it."""
        done, self._open = self._open, None
        assert done is not None, "there is an open iteration"
        wasted = time.perf_counter() - done.ended
        outcome = done.outcome()
        norm = outcome.grad_norm if outcome.successful else None
        terminated, late, not_finite, copied, *times = done.agreed.wait()
        if not_finite:
            check_finite(done.losses)
        self.stopped = bool(terminated), bool(late)
        lines = []
        if self._policy and done.before and (line := self._policy.observe(Observation(*done.before, *times))):
            lines.append(f" after iteration {self._training.iteration} {line}")
        if copied > self._copied:  # most optimizers have no state before their first step
            self._copied = copied
            size = f"{copied / 2**20:.4g} MiB on the largest rank"
            lines.append(f" post-validation: the copy that can undo a step takes {size} ({self._args.post_validation_copy})")
        accepted = outcome.successful and not clips(self._args.clip_grad, norm or 0.0)
        self._last, self._wasted = (done.ended, (done.ahead, accepted)), wasted
        step = Step(
            iteration=self._training.iteration,
            consumed_samples=self._training.consumed_samples,
            batch=done.batch,
            loss=_quotient(*done.loss.wait()) if done.loss else float("nan"),
            grad_norm=None if norm is None else float(norm),
            learning_rate=get_canonical_lr_for_logging(self._training.optimizer.param_groups) or 0.0,
            # Without fp16 it is 1, and asking for it would wait for the forwards that run ahead.
            loss_scale=float(self._training.optimizer.get_loss_scale()) if self._args.fp16 else 1.0,
            seconds=done.seconds,
            step="undone" if outcome.rolled_back else "ahead" if done.ahead else "synchronous",
        )
        if outcome.successful:
            self._training.scheduler.step(increment=done.batch)
        self._tell(step, done.report, lines)
        if any(self.stopped):
            return ValidationResult.STOPPED
        if done.ahead:
            self._clear_gradients()
            if self._snapshot and self._policy and self._policy.ahead:
                self._snapshot.take_early()
        if outcome.rolled_back:
            self._losses.clear()  # of forwards that start anew
            return ValidationResult.ROLLED_BACK
        return ValidationResult.ACCEPTED

    def _clear_gradients(self) -> None:
        for chunk in self._training.chunks:
            chunk.zero_grad_buffer()
        self._training.optimizer.zero_grad()


def evaluate(args: Namespace, training: Training, data: Iterators) -> float:
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
            reports = run_schedule(args, training, data, microbatches, check=check, forward_only=True)
            check_finite(losses)
            losses.clear()
            if reports:
                total += torch.tensor(_start_total(reports).wait())
    for chunk in training.chunks:
        chunk.train()
    training.config.timers = timers
    return _quotient(*total.tolist())


def run_schedule(
    args: Namespace,
    training: Training,
    data: Iterators,
    microbatches: int,
    *,
    check: Callable[[torch.Tensor], None] | None,
    forward_only: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """The schedule's own function, called as Megatron-LM calls it.

    Returns:
        For every microbatch the sum of its losses and its number of tokens, on the rank with the last stage.
    """
    reports: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
        forward_step_func=partial(forward_step, check=check),
        data_iterator=data if len(data) > 1 else data[0],
        model=training.chunks,
        num_microbatches=microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.seq_length,
        forward_only=forward_only,
    )
    return reports


def _start_total(reports: list[dict[str, torch.Tensor]]) -> Reduction:
    """Sum of losses and number of tokens over all data-parallel ranks."""
    total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return Reduction(total, torch.distributed.ReduceOp.SUM, group)


def _quotient(loss: float, tokens: float) -> float:
    return loss / tokens if tokens else float("nan")
