"""A rehearsal: true passes, measured one at a time on a shared device, and the iteration that a device for every rank would
have."""

from __future__ import annotations

import json
import resource
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state

from megatron.pipeline.planning.baseline import stock_at_its_best
from megatron.pipeline.planning.planned import Planned
from megatron.pipeline.record.report import Report
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.profiling import Steps, profiled
from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import Kind
from megatron.pipeline.schedule.core.timeline import Timeline
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.view.table import plain_table

_MIB = 2**20


@dataclass(frozen=True)
class Passes:
    """The passes of a kind on a stage, or of the vocabulary on a rank, in seconds, each alone on the device."""

    kind: Kind
    stage: int | None
    rank: int
    count: int
    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    Attributes:
        report: of the last iteration that was timed.
        costs: measured ones, with the hop that was asked for.
        passes: what was measured, in the order of ranks, stages and kinds.
        timeline: of one iteration if every rank had a device of its own, from the first pass to the last.
        stock: megatron-core's own schedules at these costs, at their best.
        peaks, planned_peaks: activation bytes, by pipeline rank: the most that was measured, and that the simulation has.
        processes: bytes of each process at its peak: device memory on a GPU, resident memory on a CPU.
        tokens: of an iteration.
    """

    report: Report
    costs: Costs
    passes: tuple[Passes, ...]
    timeline: Timeline
    stock: Planned
    peaks: tuple[int, ...]
    planned_peaks: tuple[float, ...]
    processes: tuple[int, ...]
    tokens: int

    def fields(self) -> dict[str, Any]:
        """As one JSON object."""
        ranks = [
            {"activation_bytes": peak, "planned_activation_bytes": planned, "process_bytes": process}
            for peak, planned, process in zip(self.peaks, self.planned_peaks, self.processes, strict=True)
        ]
        return {
            "schedule": self.report.schedule.name,
            "microbatches": self.report.schedule.microbatches,
            "hop_seconds": self.costs.hop,
            "iteration_seconds": self.timeline.makespan,
            "bubble_rate": self.timeline.makespan_bubble_rate,
            "tokens_per_second": self.tokens / self.timeline.makespan,
            "stock": {
                "schedule": str(self.stock.variant),
                "iteration_seconds": self.stock.timeline.makespan,
                "bubble_rate": self.stock.timeline.makespan_bubble_rate,
            },
            "passes": [
                {"kind": str(one.kind), "stage": one.stage, "rank": one.rank, "count": one.count}
                | {"median_seconds": one.median, "least_seconds": one.least, "most_seconds": one.most}
                for one in self.passes
            ],
            "ranks": ranks,
            "placement": self.report.schedule.placement.stages,
            "timeline": json.loads(self.timeline.to_json()),
        }

    def lines(self, hop_is_measured: bool) -> list[str]:
        """For the log."""
        own, stock, ms = self.timeline, self.stock.timeline, "{:.4g} ms".format
        source = "measured here; --rehearse-hop gives that of your links" if hop_is_measured else "--rehearse-hop"
        heads = ["rank", "stage", "pass", "ms, median", "least", "most", "passes"]
        rows = [
            [str(one.rank), "-" if one.stage is None else str(one.stage), str(one.kind)]
            + [f"{1e3 * seconds:.4g}" for seconds in (one.median, one.least, one.most)]
            + [str(one.count)]
            for one in self.passes
        ]
        memory = [
            [str(rank)] + [f"{amount / _MIB:.4g}" for amount in amounts]
            for rank, amounts in enumerate(zip(self.peaks, self.planned_peaks, self.processes, strict=True))
        ]
        return [
            f" rehearsed: {self.report.schedule.microbatches} microbatches, one pass at a time on the device",
            plain_table(heads, rows),
            plain_table(["rank", "MiB of activations", "as planned", "of the process"], memory),
            f" a device for every rank would take {ms(1e3 * own.makespan)} for the passes of an iteration, bubble "
            f"{own.makespan_bubble_rate:.1%}, {self.tokens / own.makespan:,.0f} tokens/s "
            f"(hop {ms(1e3 * self.costs.hop)}, {source})",
            f" stock at its best, at the same costs: {self.stock.variant}, {ms(1e3 * stock.makespan)}, bubble "
            f"{stock.makespan_bubble_rate:.1%}: {stock.makespan / own.makespan:.3f} times as long",
        ]


def rehearse(
    pipeline: Pipeline, hop: float | None, tokens_of: Callable[[int], int], layers: int, write: Callable[[Rehearsal], list[str]]
) -> Steps:
    """Measure a pipeline that runs its passes in turns, and say what a device for every rank would make of it.

    Args:
        hop: seconds of a message between neighbouring ranks; None to measure it here.
        tokens_of: from a number of microbatches to the tokens of an iteration.
        layers: of the model.
        write: called on every rank with what was found; returns more lines for the log.
    """
    costs, timed = yield from profiled(pipeline)
    report = timed[-1]
    own = costs if hop is None else replace(costs, hop=hop)
    schedule = report.schedule
    found = Rehearsal(
        report,
        own,
        tuple(_passes(timed)),
        simulate(schedule, own),
        stock_at_its_best(own, schedule.ranks, schedule.microbatches, layers),
        tuple(max(peaks) for peaks in zip(*(one.peak_activation_bytes for one in timed), strict=True)),
        tuple(activation_peaks(schedule, own)),
        _process_bytes(),
        tokens_of(schedule.microbatches),
    )
    yield [*found.lines(hop is None), *write(found)]


def _passes(timed: Sequence[Report]) -> list[Passes]:
    schedule = timed[0].schedule
    samples: dict[tuple[int, int | None, Kind], list[float]] = defaultdict(list)
    for report in timed:
        for rank, record in enumerate(report.ranks):
            for work, start, end in record.passes:
                if not work.kind.row.copy:
                    stage = None if work.kind.is_of_vocabulary else schedule.placement.stage(rank, work.chunk)
                    samples[rank, stage, work.kind].append(end - start)
    order = list(Kind)
    return [
        Passes(kind, stage, rank, len(seconds), statistics.median(seconds), min(seconds), max(seconds))
        for (rank, stage, kind), seconds in sorted(
            samples.items(), key=lambda item: (item[0][0], -1 if item[0][1] is None else item[0][1], order.index(item[0][2]))
        )
    ]


def _process_bytes() -> tuple[int, ...]:
    """By rank of this pipeline, the most memory that its process has had. Collective over the pipeline."""
    if torch.cuda.is_available():
        mine = torch.cuda.max_memory_reserved()
    else:
        mine = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    group = parallel_state.get_pipeline_model_parallel_group()
    everyone = [0] * group.size()
    torch.distributed.all_gather_object(everyone, mine, group=group)
    return tuple(everyone)
