"""Outputs of a run: log lines in Megatron's style, TensorBoard, one JSON line per iteration."""

from __future__ import annotations

import math
from contextlib import ExitStack, closing
from datetime import datetime
from typing import Any

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.session.metrics import Measured, Metrics, Step, on_board, tokens_per_second, training_flops


class Log:
    """The outputs of one run; it writes on one rank, the one that has the loss, and is silent on all others."""

    def __init__(self, args: Settings, writes: bool, world_size: int) -> None:
        self._args = args
        self.writes = writes
        self._world_size = world_size
        self._outputs = ExitStack()
        self._window: list[Step] = []
        self._metrics: Metrics | None = None
        self._board: Any = None
        self.first_loss: float | None = None
        self.last_loss: float | None = None

    def __enter__(self) -> Log:
        args = self._args
        if not self.writes:
            return self
        if args.pipeline.metrics:
            self._metrics = self._outputs.enter_context(closing(Metrics(args.pipeline.metrics, args.seq_length)))
        if args.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            self._board = self._outputs.enter_context(SummaryWriter(args.tensorboard_dir))
        return self

    def __exit__(self, *_: object) -> None:
        self._outputs.close()

    def line(self, text: str) -> None:
        if self.writes:
            print(text, flush=True)

    def step(self, step: Step, measured: Measured | None) -> None:
        """Record an iteration; every ``--log-interval`` iterations a line tells about those since the last.

        Args:
            measured: where that was asked for.
        """
        if not self.writes:
            return
        if math.isfinite(step.loss):
            self.first_loss = step.loss if self.first_loss is None else self.first_loss
            self.last_loss = step.loss
        self._window.append(step)
        if self._metrics and (trouble := self._metrics.write(step, measured)):
            self.line(trouble)
            self._metrics = None
        if self._board and step.iteration % self._args.tensorboard_log_interval == 0:
            self._write_board(step, measured)
        if step.iteration % self._args.log_interval == 0:
            self.line(self._log_line(step, measured))
            self._window.clear()

    def evaluation(self, split: str, iteration: int, loss: float) -> None:
        perplexity = math.exp(min(20.0, loss))
        self.line(f" {split} loss at iteration {iteration} | lm loss value: {loss!r} | lm loss PPL: {perplexity:.6E} |")
        if self._board:
            self._board.add_scalar(f"lm loss {split}", loss, iteration)

    def _log_line(self, step: Step, measured: Measured | None) -> str:
        """The last iteration's loss and norm in full, and times over all iterations since the last line."""
        seconds = sum(one.seconds for one in self._window)
        batch = sum(one.batch for one in self._window)
        parts = [
            f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {step.iteration:8d}/{self._args.train_iters:8d}",
            f"consumed samples: {step.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {1000 * seconds / len(self._window):.1f}",
        ]
        if self._args.log_throughput:
            teraflops = training_flops(self._args, batch) / seconds / self._world_size / 1e12
            parts.append(f"throughput per GPU (TFLOP/s/GPU): {teraflops:.4g}")
        parts += [
            f"tokens per second: {tokens_per_second(self._args.seq_length, batch, seconds):.0f}",
            f"learning rate: {step.learning_rate:.6E}",
            f"global batch size: {step.batch:5d}",
            f"lm loss: {step.loss!r}",
            f"loss scale: {step.loss_scale:.1f}",
            f"grad norm: {step.grad_norm!r}",
            f"number of skipped iterations: {sum(one.grad_norm is None for one in self._window):3d}",
            f"number of nan iterations: {sum(not math.isfinite(one.loss) for one in self._window):3d}",
        ]
        if self._args.steps.ahead:
            parts.append(f"number of undone steps: {sum(one.step == 'undone' for one in self._window):3d}")
        if measured:
            parts.append(f"bubble: {measured.bubble_rate:.1%}")
            if measured.span_bubble_rate is not None:
                parts.append(f"bubble of the span: {measured.span_bubble_rate:.1%}")
            if measured.slowdown:
                parts.append(f"measured / simulated: {measured.slowdown:.4f}")
        return " | ".join(parts) + " |"

    def _write_board(self, step: Step, measured: Measured | None) -> None:
        values = {
            "lm loss": step.loss,
            "grad-norm": step.grad_norm,
            "learning-rate": step.learning_rate,
            "loss-scale": step.loss_scale,
            "batch-size": step.batch,
            "iteration-time": step.seconds,
            **on_board(step, measured, self._args.seq_length),
        }
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(name, value, step.iteration)
