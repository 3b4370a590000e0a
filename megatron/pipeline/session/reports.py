"""The uses of an iteration's report: numbers for a log, a trace on disk, and costs to plan again with."""

from __future__ import annotations

import torch

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.monitor.report import PendingReport, Report
from megatron.pipeline.planner import Objective
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.watch import Slow, watching
from megatron.pipeline.session.metrics import Measured
from megatron.pipeline.session.planning import replanning
from megatron.pipeline.session.rehearsal.files import rehearsing
from megatron.pipeline.session.trace import write_trace


class Reports:
    """Takes the report of every training iteration: first ``measured``, then ``use``, on all ranks.

    Attributes:
        measures: whether iterations are still measured, to plan again or for a rehearsal.
    """

    def __init__(self, args: Settings, pipeline: Pipeline) -> None:
        self._args, self._pipeline = args, pipeline
        self._steps = rehearsing(args, pipeline) or replanning(args, pipeline)
        self._watch = watching(pipeline, args.pipeline.watch) if not args.rehearsal.on else None
        self._pending: PendingReport | None = None
        self._report: Report | None = None

    @property
    def measures(self) -> bool:
        return self._steps is not None

    def measured(self, iteration: int, pending: PendingReport | None, wanted: bool) -> Measured | None:
        """Wait for the report of an iteration, where this rank has a use for it.

        Args:
            wanted: whether the caller needs what is returned.
        """
        needed = wanted or self.measures or self._traces(iteration)
        self._pending = pending
        self._report = report = pending.wait() if pending and needed else None
        if report is None or not wanted:
            return None
        timeline, interlock = report.timeline, self._pipeline.plans.objective is Objective.SPAN
        span_bubble_rate = timeline.span_bubble_rate if interlock else None
        slowdown, slow = self._pipeline.slowdown(report), [one.fields() for one in self._slow]
        return Measured(timeline.bubble_rate, span_bubble_rate, slowdown, report.peak_activation_bytes, slow)

    def use(self, iteration: int) -> list[str]:
        """Write the trace of the iteration, if it is to have one, and go on with what iterations are measured for; returns lines
        for the log."""
        if (folder := self._args.pipeline.trace) and self._report and self._traces(iteration):
            write_trace(folder, iteration, self._pipeline, self._report, [str(one) for one in self._slow])
        if self._steps is None:
            return self._watch.step(self._pending) if self._watch else []
        if self._report is None:
            return []
        try:
            return self._steps.send(self._report)
        except StopIteration:
            self._steps = None
            return []

    @property
    def _slow(self) -> list[Slow]:
        return list(self._watch.slow.values()) if self._watch else []

    def _traces(self, iteration: int) -> bool:
        return bool(self._args.pipeline.trace) and iteration % self._args.log_interval == 0 and torch.distributed.get_rank() == 0
