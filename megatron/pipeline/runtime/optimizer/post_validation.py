"""Optimizer steps for any training loop: some are taken ahead, and all stand once they return."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.pipeline.distributed.device import to_device
from megatron.pipeline.distributed.reduction import Reduction
from megatron.pipeline.monitor.report import PendingReport
from megatron.pipeline.runtime.optimizer.policy import Observation, Policy
from megatron.pipeline.runtime.optimizer.snapshot import Keep
from megatron.pipeline.runtime.optimizer.step_ahead import Outcome, StepAhead, clips, parts_of, snapshot_of
from megatron.pipeline.runtime.pipeline import Pipeline


@dataclass(frozen=True)
class TakenStep:
    """A step that stands.

    Attributes:
        successful: whether there was one; there is none where a scaled gradient is not finite.
        grad_norm: before clipping; None without a step.
        how: "synchronous", "ahead", or "undone": taken ahead, and then clipped or skipped.
        stops: of each of the ranks' numbers, the largest.
        report: what was measured of the iteration, on its way; None where the pipeline does not measure.
        lines: for a log.
    """

    successful: bool
    grad_norm: float | None
    how: str
    stops: list[float]
    report: PendingReport | None
    lines: list[str]

    @property
    def anew(self) -> bool:
        """Tell whether forwards of the iteration that follows have run in vain, and will run anew."""
        return self.how != "synchronous" and (self.how == "undone" or any(self.stops))


class PostValidation:
    """The optimizer's steps in a training loop.

    A step ahead is taken without waiting for the gradient norm. The iteration that follows then begins, and runs up to its first
    backward, by when every rank knows the norm. There the step is accepted, or rolled back and taken as it must be. So all that
    the loop does between two iterations meets parameters, norms and losses that stand.

    Args:
        pipeline: whose ``forward_backward`` the loop calls.
        optimizer: megatron-core's, with float32 or mixed precision, distributed or not, or a chain of such.
        when: "measured": while measurements show a gain; "always"; None: never.
        keep: where the copy is kept from which a step is rolled back.
    """

    def __init__(
        self, pipeline: Pipeline, optimizer: MegatronOptimizer, when: str | None = "measured", keep: Keep = Keep.DEVICE
    ) -> None:
        self._pipeline, self._optimizer, self._keep = pipeline, optimizer, keep
        self._step_of_upstream = optimizer.step
        self._policy = Policy(when == "always") if when else None
        self._snapshot = snapshot_of(optimizer, keep) if when else None
        self._last: tuple[float, tuple[bool, bool]] | None = None  # when the last step was taken; whether ahead, and accepted
        self._wasted = 0.0  # seconds in which forwards ran ahead of it
        self._copied = 0.0  # the most bytes that copies have taken on a rank

    def step(self, following: Mapping[str, Any] | None = None, stops: torch.Tensor | None = None) -> TakenStep:
        """Take a step, in place of ``optimizer.step()``. Gradients must be cleared after it, as ever.

        Args:
            following: keywords with which the loop will call ``forward_backward`` next, at once; None where something else comes
                first that reads data or runs the model, such as an evaluation, or saves. All ranks must agree on that.
            stops: reasons of this rank to stop, numbers in float64. Where one is not 0 on any rank, nothing of the next iteration
                has run.
        """
        ahead = following is not None and self._policy is not None and self._policy.ahead
        provisional = StepAhead(self._optimizer, self._snapshot) if ahead else None
        outcome = None if provisional else self._synchronous()
        taken = time.perf_counter()
        agreed = Reduction(self._numbers(taken, stops), torch.distributed.ReduceOp.MAX)
        report = self._pipeline.start_report() if self._pipeline.measures else None
        if provisional and following is not None:
            self._pipeline.begin(**following)
        self._wasted = time.perf_counter() - taken
        if provisional:
            outcome = provisional.resolve()
        assert outcome is not None
        *heard, copied, seconds, wasted = agreed.wait()
        lines = []
        if self._policy and self._last and (line := self._policy.observe(Observation(*self._last[1], seconds, wasted))):
            lines.append(line)
        if copied > self._copied:  # most optimizers have no state before their first step
            self._copied = copied
            size = f"{copied / 2**20:.4g} MiB on the largest rank"
            lines.append(f"post-validation: the copy that can undo a step takes {size} ({self._keep})")
        norm = float(outcome.grad_norm or 0.0)
        accepted = outcome.successful and not any(clips(part.config.clip_grad, norm) for part in parts_of(self._optimizer))
        self._last = None if following is None else (taken, (ahead, accepted))
        how = "undone" if outcome.rolled_back else "ahead" if ahead else "synchronous"
        step = TakenStep(outcome.successful, outcome.grad_norm, how, heard, report, lines)
        if step.anew:
            self._pipeline.start_anew()
        if ahead and self._snapshot and self._policy and self._policy.ahead:
            self._snapshot.take_early()
        return step

    def _synchronous(self) -> Outcome:
        if self._snapshot is not None:
            self._snapshot.ready()
            self._snapshot.release()
        successful, norm, _ = self._step_of_upstream()
        return Outcome(successful, norm if successful else None, rolled_back=False)

    def _numbers(self, taken: float, stops: torch.Tensor | None) -> torch.Tensor:
        """The numbers that ranks agree on: their reasons to stop, bytes of the copy, and see ``Observation``."""
        costs = [0.0, 0.0]
        if self._policy:
            began, _ = self._last or (taken, None)
            costs = [seconds / self._pipeline.microbatches for seconds in (taken - began, self._wasted)]
        numbers = to_device([self._snapshot.bytes if self._snapshot else 0, *costs])
        return numbers if stops is None else torch.cat((stops, numbers))
