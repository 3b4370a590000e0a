"""A rehearsal: true passes, measured one at a time on a shared device, and the iteration that a device for every rank would
have."""

from __future__ import annotations

import json
import resource
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state

from megatron.pipeline.monitor.report import Report
from megatron.pipeline.planner import Costs, Kind, Planned, Timeline, view

_MIB = 2**20
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Passes:
    """The passes of a kind on a stage, or of the vocabulary on a rank, in seconds, each alone on the device."""

    kind: Kind
    stage: int | None
    rank: int
    count: int
    median_seconds: float
    least_seconds: float
    most_seconds: float


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        report: of the last iteration that was timed.
        costs: measured ones, with the hop that was asked for.
        passes: what was measured, in the order of ranks, stages and kinds.
        timeline: of one iteration if every rank had a device of its own, from the first pass to the last.
        step: seconds of the optimizer's step, on the rank where it takes longest.
        replicas: seconds that sums of gradients over data-parallel replicas, and gathers of weights, add to an iteration; None
            where there are replicas, and their links are not known.
        stock: megatron-core's own schedules at these costs, at their best.
        peaks, planned_peaks: activation bytes, by pipeline rank: the most that was measured, and that the simulation has.
        processes: bytes of each process at its peak: device memory on a GPU, resident memory on a CPU.
        tokens: of an iteration.
    """

    report: Report
    costs: Costs
    passes: tuple[Passes, ...]
    timeline: Timeline
    step: float
    replicas: float | None
    stock: Planned
    peaks: tuple[int, ...]
    planned_peaks: tuple[float, ...]
    processes: tuple[int, ...]
    tokens: int

    def seconds(self, timeline: Timeline) -> float:
        """Seconds of an iteration: its passes, the optimizer's step, and what replicas add."""
        return timeline.makespan + self.step + (self.replicas or 0.0)

    def fields(self) -> dict[str, Any]:
        """As one JSON object."""
        ranks = [
            {"activation_bytes": peak, "planned_activation_bytes": planned, "process_bytes": process}
            for peak, planned, process in zip(self.peaks, self.planned_peaks, self.processes, strict=True)
        ]
        return {
            "schedule": self.report.schedule.name,
            "plan": self.report.schedule.fields(),
            "microbatches": self.report.schedule.microbatches,
            "hop_seconds": self.costs.hop,
            "passes_seconds": self.timeline.makespan,
            "step_seconds": self.step,
            "replicas_seconds": self.replicas,
            "iteration_seconds": self.seconds(self.timeline),
            "bubble_rate": self.timeline.bubble_rate,
            "tokens_per_second": self.tokens / self.seconds(self.timeline),
            "stock": {
                "schedule": str(self.stock.variant),
                "passes_seconds": self.stock.timeline.makespan,
                "iteration_seconds": self.seconds(self.stock.timeline),
                "bubble_rate": self.stock.timeline.bubble_rate,
            },
            "passes": [asdict(one) for one in self.passes],
            "ranks": ranks,
            "placement": self.report.schedule.placement.stages,
            "timeline": json.loads(self.timeline.to_json()),
        }

    @property
    def _of_replicas(self) -> str:
        if self.replicas is None:
            return "; without the sum of gradients over replicas: --rehearse-hop with a GPU's name or a machine's file adds it"
        return f", and {1e3 * self.replicas:.4g} ms for gradients and weights of data-parallel replicas" if self.replicas else ""

    def lines(self, hop_is_measured: bool) -> list[str]:
        """For the log."""
        own, stock, ms = self.timeline, self.stock.timeline, "{:.4g} ms".format
        source = "measured here; --rehearse-hop gives that of your links" if hop_is_measured else "--rehearse-hop"
        heads = ["rank", "stage", "pass", "ms, median", "least", "most", "passes"]
        rows = [
            [str(one.rank), "-" if one.stage is None else str(one.stage), str(one.kind)]
            + [f"{1e3 * seconds:.4g}" for seconds in (one.median_seconds, one.least_seconds, one.most_seconds)]
            + [str(one.count)]
            for one in self.passes
        ]
        memory = [
            [str(rank)] + [f"{amount / _MIB:.4g}" for amount in amounts]
            for rank, amounts in enumerate(zip(self.peaks, self.planned_peaks, self.processes, strict=True))
        ]
        return [
            f" rehearsed: {self.report.schedule.microbatches} microbatches, one pass at a time on the device",
            view.plain_table(heads, rows),
            view.plain_table(["rank", "MiB of activations", "as planned", "of the process"], memory),
            f" a device for every rank would take {ms(1e3 * self.seconds(own))} for an iteration, "
            f"{self.tokens / self.seconds(own):,.0f} tokens/s: {ms(1e3 * own.makespan)} for its passes, bubble "
            f"{own.bubble_rate:.1%} (hop {ms(1e3 * self.costs.hop)}, {source}), and {ms(1e3 * self.step)} for the "
            f"optimizer's step{self._of_replicas}",
            f" stock at its best, at the same costs: {self.stock.variant}, {ms(1e3 * self.seconds(stock))}, bubble "
            f"{stock.bubble_rate:.1%}: {self.seconds(stock) / self.seconds(own):.3f} times as long",
        ]


def passes_of(timed: Sequence[Report]) -> tuple[Passes, ...]:
    """The passes of the iterations that were timed, by rank, stage and kind."""
    schedule = timed[0].schedule
    samples: dict[tuple[int, int | None, Kind], list[float]] = defaultdict(list)
    for report in timed:
        for rank, record in enumerate(report.ranks):
            for work, start, end in record.passes:
                if not work.kind.is_copy:
                    stage = None if work.kind.is_of_vocabulary else schedule.placement.stage(rank, work.chunk)
                    samples[rank, stage, work.kind].append(end - start)
    order = list(Kind)
    return tuple(
        Passes(kind, stage, rank, len(seconds), statistics.median(seconds), min(seconds), max(seconds))
        for (rank, stage, kind), seconds in sorted(
            samples.items(), key=lambda item: (item[0][0], -1 if item[0][1] is None else item[0][1], order.index(item[0][2]))
        )
    )


def process_bytes() -> int:
    """The most memory that this process has had."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def of_all_ranks(mine: Number) -> tuple[Number, ...]:
    """A number of every rank of this pipeline. Collective over the pipeline."""
    group = parallel_state.get_pipeline_model_parallel_group()
    everyone = [mine] * group.size()
    torch.distributed.all_gather_object(everyone, mine, group=group)
    return tuple(everyone)
