"""Costs of the passes of a training: its first iterations, measured while it goes on."""

from __future__ import annotations

import socket
from collections.abc import Generator
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from megatron.core import parallel_state

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.monitor import cost_profile
from megatron.pipeline.monitor.report import Report
from megatron.pipeline.planner import Costs, kinds
from megatron.pipeline.runtime.offload import probe
from megatron.pipeline.runtime.ping import ping, ping_all
from megatron.pipeline.runtime.pipeline import Pipeline

__all__ = ["Profile", "profiled"]

TIMED = 3  # iterations, unless a caller wants more
ITERATIONS = 2 + TIMED  # that ``profiled`` then takes
_MIB = 2**20

# One step per iteration: ``next`` before the first, then ``send`` with the report of each, which returns lines for the log.
Steps: TypeAlias = Generator[list[str], Report, None]


class Profile(NamedTuple):
    """Costs of a pipeline, in seconds and bytes, and the reports of the iterations that were timed."""

    costs: Costs
    timed: list[Report]


def profiled(pipeline: Pipeline, sizes: Costs | None = None, times: int = TIMED) -> Generator[list[str], Report, Profile]:
    """Measure 2 + ``times`` iterations, on all ranks of the world together; returns after the last of them.

    The first iteration warms up, the second is counted in bytes, the others are timed.

    Args:
        pipeline: one that measures.
        sizes: costs that have the bytes, where tensors cannot be counted; None to count them.
        times: iterations that are timed.
    """
    yield []
    pipeline.counts_bytes = sizes is None
    counted = yield []
    pipeline.counts_bytes = False
    timed = []
    for _ in range(times):
        timed.append((yield []))
    return Profile(_costs(pipeline, counted, timed, sizes), timed)


def _costs(pipeline: Pipeline, counted: Report, timed: list[Report], sizes: Costs | None) -> Costs:
    """Agree on the costs of passes, hops and the vocabulary's collectives. Collective over the world."""
    mine = cost_profile.measured_costs(timed, counted)
    if this_device().type == "cuda":  # elsewhere nothing runs beside communication
        mine = replace(mine, beside_communication=cost_profile.beside_communication(timed, mine))
    if sizes is not None:
        mine = cost_profile.with_sizes(mine, sizes)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    transport, groups = pipeline.transport, pipeline.vocabulary_groups
    hops = ping(transport, rank, pipeline.placement) if transport else []
    hidden = transport.blank(kinds.Flow.ACTIVATION)[0] if transport else None
    exchanges = ping_all(groups.pipeline, torch.zeros_like(hidden)) if groups and hidden is not None else []
    costs = cost_profile.agree(mine, hops, exchanges)
    if not pipeline.plans.offloads:
        return costs
    copies = probe.measure(pipeline.offloading, socket.gethostname(), rank, pipeline.placement.ranks)
    return replace(costs, copies=copies)


def in_words(costs: Costs) -> str:
    """The costs in one line: the range over the stages."""

    def spread(values: list[float], unit: float) -> str:
        low, high = (f"{value / unit:.4g}" for value in (min(values), max(values)))
        return low if low == high else f"{low}..{high}"

    stages = costs.stages
    times = {"F": "forward", "B": "backward", "W": "weight"}
    parts = [f"{kind} {spread([getattr(stage, name) for stage in stages], 1e-3)}" for kind, name in times.items()]
    held, kept = (spread([getattr(stage, name) for stage in stages], _MIB) for name in ("activation", "retained"))
    until = "and B" if any(stage.backward_allocates for stage in stages) else "of which"
    words = f"{', '.join(parts)} ms per stage, hop {1e3 * costs.hop:.3g} ms; F holds {held} MiB, {until} {kept} until W"
    words += _copies_in_words(costs)
    shares = [f"{kind} {1e3 * costs.vocabulary.seconds(kind):.4g}" for kind in kinds.VOCABULARY_KINDS]
    if not costs.vocabulary.total:
        return words
    return f"{words}; of the vocabulary {', '.join(shares)} ms per rank, collective {1e3 * costs.exchange:.3g} ms"


def _copies_in_words(costs: Costs) -> str:
    copies = costs.copies
    if not copies.to_host or not copies.to_device:
        return ""
    speeds = " and ".join(f"{probe.MARGIN / seconds / 1e9:.4g}" for seconds in (copies.to_host, copies.to_device))
    shared = f", {copies.shared:.0%} with all {copies.switch} ranks of a machine" if copies.switch > 1 else ""
    return (
        f"; copies {speeds} GB/s to host memory and back, {copies.both:.0%} of that in both directions at once{shared}; planned "
        f"as a tenth slower, k = {costs.k():.3g}"
    )
