"""The training loop: iterations, evaluations, checkpoints, and the ways to stop."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megatron.core.datasets.utils import Split
from megatron.core.timers import Timers

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.session.reports import Reports
from megatron.pipeline.trainer import checkpoint
from megatron.pipeline.trainer.data import Samples, evaluates
from megatron.pipeline.trainer.iterations import Iterations, evaluate
from megatron.pipeline.trainer.run_log import Log
from megatron.pipeline.trainer.state import Training


@dataclass
class Loop:
    """One training, with what it takes."""

    args: Settings
    training: Training
    samples: Samples
    pipeline: Pipeline
    log: Log
    timers: Timers | None

    def train(self) -> None:
        """Train until ``--train-iters``, or until SIGTERM, ``--exit-interval`` or ``--exit-duration-in-mins`` stops it."""
        args, training = self.args, self.training
        with _termination_signal() as terminated, _quick_garbage_collection():
            saved_at = training.iteration if args.load else None
            reason = ""
            for reason in self._pauses(terminated):  # noqa: B007
                if evaluates(args) and training.iteration % args.eval_interval == 0:
                    self._evaluate(Split.valid)
                if args.save and args.save_interval and training.iteration % args.save_interval == 0:
                    saved_at = self._save()
            if reason:
                self.log.line(f" stopping after iteration {training.iteration}: {reason}")

            if args.save and saved_at != training.iteration:
                self._save()
            if evaluates(args) and not reason:
                if training.iteration % args.eval_interval:
                    self._evaluate(Split.valid)
                self._evaluate(Split.test)

    def _pauses(self, terminated: Callable[[], bool]) -> Iterator[str]:
        """Train; yields after every iteration a reason to stop, or an empty string."""
        args, training, log = self.args, self.training, self.log
        if training.iteration >= args.train_iters:  # a checkpoint was there
            return
        started = time.monotonic()
        reports = Reports(args, self.pipeline)

        def stops() -> tuple[bool, bool]:
            late = bool(args.exit_duration_in_mins) and time.monotonic() - started > 60 * args.exit_duration_in_mins
            return terminated(), late

        with self.samples.microbatches(Split.train, training.consumed_samples) as data:
            assert data is not None, "the training split is never empty: check_data saw to it"
            iterations = Iterations(args, training, self.pipeline, data, stops)
            reason = ""
            while training.iteration < args.train_iters and not reason:
                follows = not reports.measures and not _pauses_after(args, training.iteration + 1)
                step, pending, lines = iterations.run(follows)
                logged = step.iteration % args.log_interval == 0
                wanted = log.writes and bool(args.pipeline.metrics or args.tensorboard_dir or logged)
                log.step(step, reports.measured(step.iteration, pending, wanted))
                if self.timers is not None and logged:
                    self.timers.log(list(self.timers._timers), normalizer=args.log_interval)
                for line in (*lines, *reports.use(step.iteration)):
                    log.line(line)
                reason = _reason_to_stop(args, training.iteration, *iterations.stopped)
                yield reason

    def _evaluate(self, split: Split) -> None:
        """Evaluate on fresh samples: those of earlier evaluations are consumed, also across restarts."""
        args, iteration = self.args, self.training.iteration
        earlier = (iteration - 1) // args.eval_interval if split is Split.valid else 0
        with self.samples.microbatches(split, earlier * args.eval_iters * args.global_batch_size) as data:
            if data is not None:
                name = {Split.valid: "validation", Split.test: "test"}[split]
                self.log.evaluation(name, iteration, evaluate(args, self.training, data))

    def _save(self) -> int:
        self.log.line(f" saved checkpoint {checkpoint.save(self.args, self.training)}")
        return self.training.iteration


def _pauses_after(args: Settings, iteration: int) -> bool:
    """Tell whether an iteration is followed by something else than the next one."""
    intervals = [args.train_iters, args.exit_interval, args.save and args.save_interval, evaluates(args) and args.eval_interval]
    return any(interval and iteration % interval == 0 for interval in intervals)


def _reason_to_stop(args: Settings, iteration: int, terminated: bool, late: bool) -> str:
    """Why training ends here; empty to go on."""
    if args.exit_interval and iteration % args.exit_interval == 0:
        return f"--exit-interval {args.exit_interval}"
    if terminated:
        return "SIGTERM"
    return f"--exit-duration-in-mins {args.exit_duration_in_mins:g}" if late else ""


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
