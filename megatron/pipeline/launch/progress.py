"""Metrics, traces and measured costs of the iterations that a script of Megatron-LM's trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.runtime.optimizer.post_validation import TakenStep
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.session.metrics import Metrics, Step, on_board
from megatron.pipeline.session.reports import Reports
from megatron.pipeline.session.trace import draw_last_trace


def is_last_rank() -> bool:
    """Tell whether this is the rank on which Megatron-LM reports losses."""
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


class LaunchProgress:
    """A context around training; upstream's own log continues.

    Args:
        args: the flags as our own program has them.
    """

    def __init__(self, args: Settings, pipeline: Pipeline) -> None:
        self._args, self._pipeline = args, pipeline
        self._metrics = Metrics(args.pipeline.metrics, args.seq_length) if args.pipeline.metrics and is_last_rank() else None
        self._reports = Reports(args, pipeline)
        self._boards: list[Callable[[dict[str, float], int], object]] = _boards() if is_last_rank() else []

    def __enter__(self) -> LaunchProgress:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._metrics:
            self._metrics.close()
        traces = self._args.pipeline.trace
        ended_well = error is None or isinstance(error, SystemExit)  # upstream exits from within its loop
        if traces and ended_well and torch.distributed.get_rank() == 0 and (drawn := draw_last_trace(traces)):
            print(f" timeline picture: {drawn}", flush=True)

    def measures(self) -> bool:
        """Tell whether iterations are measured, to plan again or for a rehearsal."""
        return self._reports.measures

    def step(self, args: Any, result: Any, optimizer: Any, seconds: float, taken: TakenStep | None = None) -> None:
        """Write the metrics of an iteration; collective over the pipeline's ranks.

        Args:
            args: upstream's.
            result: of its ``train_step``.
            taken: the optimizer's step, if it may be taken ahead: the next iteration then runs already.
        """
        losses, skipped, norm = result[0], result[1], result[5]
        iteration = args.curr_iteration + 1
        pending = taken.report if taken else self._pipeline.start_report() if self._pipeline.measures else None
        boards = self._boards if iteration % args.tensorboard_log_interval == 0 else []
        measured = self._reports.measured(iteration, pending, wanted=bool(self._metrics or boards))
        lines = [f" after iteration {iteration} {line}" for line in taken.lines] if taken else []
        for line in (*lines, *self._reports.use(iteration)):
            if is_last_rank():
                print(line, flush=True)
        if not (self._metrics or boards):
            return
        batch = get_current_global_batch_size()
        step = Step(
            iteration=iteration,
            consumed_samples=args.consumed_train_samples + batch,
            batch=batch,
            loss=float(next(iter(losses.values()))) if losses else float("nan"),
            grad_norm=None if skipped or norm is None else float(norm),
            learning_rate=get_canonical_lr_for_logging(optimizer.param_groups) or 0.0,
            loss_scale=float(optimizer.get_loss_scale()),
            seconds=seconds,
            step=taken.how if taken else "synchronous",
        )
        for write in boards:
            write(on_board(step, measured, self._args.seq_length), iteration)
        if self._metrics and (trouble := self._metrics.write(step, measured)):
            print(trouble, flush=True)
            self._metrics = None


def _boards() -> list[Callable[[dict[str, float], int], object]]:
    """Writers of an iteration's values where Megatron-LM writes its own: TensorBoard and Weights & Biases, as flags ask."""
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    found: list[Callable[[dict[str, float], int], object]] = []
    if board := get_tensorboard_writer():
        found.append(lambda values, at: [board.add_scalar(name, value, at) for name, value in values.items()])
    if wandb := get_wandb_writer():
        found.append(wandb.log)
    return found
