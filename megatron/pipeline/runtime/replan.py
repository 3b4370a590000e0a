"""From equal costs to measured ones while training goes on: profile some iterations, plan beside them, swap in between.

Training's numbers stay what they are: the placement does not change, and every schedule on it computes the same.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron.pipeline.monitor.report import Report
from megatron.pipeline.planner import (
    Costs,
    HostLimitTooLow,
    LimitTooLow,
    Objective,
    Schedule,
    activation_peaks,
    refusals,
    simulate,
    view,
)
from megatron.pipeline.runtime.offload.host_memory import LIMIT_FLAG
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.profiling import TIMED, Steps, in_words, profiled

_MIB = 2**20


def replan(
    pipeline: Pipeline, limit_of: Callable[[Costs], float | None], write: Callable[[str], Path | None], sizes: Costs | None = None
) -> Steps:
    """Profile a pipeline's first iterations, plan its schedules again at the measured costs, and run those from then on.

    On all ranks of the world together (some steps are collective). It is over (StopIteration) when the new schedule has been
    measured, or there is none. After the profile ``pipeline.background`` plans. While it does there is one small collective
    per iteration; when it is done all ranks get the plans, verify them, and run them from the next iteration on. A schedule from
    a file and megatron-core's own are just measured.

    Args:
        pipeline: one that measures.
        limit_of: from measured costs to the most activation memory that a rank may hold, in bytes; None for no limit.
        write: called on rank 0 of the world with the costs as JSON; returns where it wrote them.
        sizes: see ``profiled``.

    Raises:
        RanksDiffer: some ranks take the new schedules, and others, which have other flags, do not.
    """
    costs, timed = yield from profiled(pipeline, sizes)
    lines = [f" profiled: {in_words(costs)}"]
    if torch.distributed.get_rank() == 0 and (path := write(costs.to_json())) is not None:
        logging.getLogger(__name__).info("costs of this run: %s", path)
    if not pipeline.plans.has_family:
        pipeline.plans.adopt({}, costs)
        yield [*lines, f" {_measured(pipeline, timed)}"]
        return

    before, limit = pipeline.plans.planned, limit_of(costs)
    coming, recent = pipeline.background.again(costs, limit), timed
    while (found := coming.take()) is None:
        recent = [*recent, (yield lines)][-TIMED:]
        lines = []
    error, after = (_why(found, limit, pipeline.settings.host_limit), {}) if isinstance(found, Exception) else ("", found)
    try:
        pipeline.plans.adopt(after, costs, None if error else limit)
    except ValueError as wrong:
        error = str(wrong)
    pipeline.agree()  # a rank with other flags may have refused what the others took
    old, limited = _measured(pipeline, recent), pipeline.settings.host_limit is not None
    if error:
        yield [*lines, f" WARNING: {pipeline.name} is not planned again, and keeps its schedule: {error}", f" {old}"]
        return
    lines += [
        f" {pipeline.name} planned again in {plan.seconds or 0:.2g} s for {m} microbatches: "
        + _change(before[m], plan.schedule, costs, limit, pipeline.plans.objective)
        + (f"; {view.copies_in_words(plan.schedule, costs, in_bytes=True, limited=limited)}" if pipeline.plans.offload else "")
        for m, plan in after.items()
    ]
    fresh: list[Report] = []
    for _ in range(1 + TIMED):
        fresh.append((yield lines))
        lines = []
    yield [f" until then: {old}", f" since then: {_measured(pipeline, fresh[1:])}"]


def _why(error: Exception, limit: float | None, host_limit: float | None) -> str:
    """Why there is no plan, in MiB where it is for want of memory."""
    if isinstance(error, LimitTooLow):
        return f"it needs {refusals.MIB.at_least(error.least)} on a rank, and the limit is {refusals.MIB.amount(limit or 0)}"
    if isinstance(error, HostLimitTooLow):
        needs, given = refusals.HOST_MIB.at_least(error.least), refusals.MIB.amount(host_limit or 0)
        return f"one microbatch of a chunk takes {needs} of host memory, and {LIMIT_FLAG} is {given}"
    return f"planning failed: {error}"


def _change(before: Schedule, after: Schedule, costs: Costs, limit: float | None, objective: Objective) -> str:
    """Say what a new schedule is expected to bring."""
    timelines = [simulate(schedule, costs) for schedule in (before, after)]
    (old, waste), (new, wastes) = ((objective.length(one), one.bubble_rate) for one in timelines)
    held, holds = (max(activation_peaks(schedule, costs)) / _MIB for schedule in (before, after))
    kept = "the order stays" if before.passes == after.passes else "another order"
    if limit is not None and held > limit / _MIB:
        kept += f", since the one before held up to {held:.4g} MiB and the limit is {limit / _MIB:.4g} MiB"
    return (
        f"{kept}; predicted {objective} {1e3 * old:.4g} -> {1e3 * new:.4g} ms, bubble {waste:.1%} -> "
        f"{wastes:.1%}, activations up to {holds:.4g} MiB a rank"
    )


def _measured(pipeline: Pipeline, reports: Sequence[Report]) -> str:
    """Medians over iterations, next to what the pipeline's costs predict for each of them."""
    bubble = statistics.median(report.timeline.bubble_rate for report in reports)
    ratios = list(filter(None, map(pipeline.slowdown, reports)))
    compared = f", measured / simulated {statistics.median(ratios):.4f}" if ratios else ""
    return f"measured bubble {bubble:.1%}{compared} ({len(reports)} iterations)"
