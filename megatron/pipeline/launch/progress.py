"""What is told of the iterations that a script of Megatron-LM's trains: metrics, traces, and costs to plan again with."""

from __future__ import annotations

from argparse import Namespace
from types import TracebackType
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from megatron.pipeline.record.report import Report
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.trainer.metrics import Measured, Metrics, Step
from megatron.pipeline.trainer.planning import replanning
from megatron.pipeline.trainer.trace import draw_consecutive, draw_last_trace, write_trace


def is_last_rank() -> bool:
    """Whether this is the rank on which Megatron-LM reports losses."""
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


class Progress:
    """A context around training; upstream's own log goes on beside it.

    Args:
        args: the flags as our own program has them.
    """

    def __init__(self, args: Namespace, pipeline: Pipeline) -> None:
        self._args, self._pipeline = args, pipeline
        self._metrics = Metrics(args.metrics, args.seq_length) if args.metrics and is_last_rank() else None
        self._profiling = replanning(args, pipeline)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._metrics:
            self._metrics.close()
        traces = self._args.pipeline_trace
        ended_well = error is None or isinstance(error, SystemExit)  # upstream exits from within its loop
        if traces and ended_well and torch.distributed.get_rank() == 0:
            drawn = [draw_last_trace(traces), draw_consecutive(traces)]
            print("\n".join(f" timeline picture: {path}" for path in drawn if path), flush=True)

    def step(self, args: Any, result: Any, optimizer: Any, seconds: float) -> None:
        """Tell of an iteration; collective over the pipeline's ranks.

        Args:
            args: upstream's.
            result: of its ``train_step``.
        """
        losses, skipped, norm = result[0], result[1], result[5]
        iteration = args.curr_iteration + 1
        report = self._report(iteration)
        if self._metrics is None:
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
        )
        if trouble := self._metrics.write(step, self._measured(report)):
            print(trouble, flush=True)
            self._metrics = None

    def _report(self, iteration: int) -> Report | None:
        """What was measured, where anybody wants it; ranks plan again from it."""
        pending = self._pipeline.start_report() if self._pipeline.measures else None
        traced = self._args.pipeline_trace and iteration % self._args.log_interval == 0 and torch.distributed.get_rank() == 0
        if pending is None or not (traced or self._metrics or self._profiling):
            return None
        report = pending.wait()
        if traced:
            write_trace(self._args.pipeline_trace, iteration, self._pipeline, report)
        if self._profiling:
            try:
                for line in self._profiling.send(report):
                    if is_last_rank():
                        print(line, flush=True)
            except StopIteration:
                self._profiling = None
        return report

    def _measured(self, report: Report | None) -> Measured | None:
        if report is None:
            return None
        return Measured(report.bubble_rate, self._pipeline.slowdown(report), report.peak_activation_bytes)
