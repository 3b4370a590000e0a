"""Traffic of a schedule from anywhere, with the costs at which it is certified: a file's, or that of megatron-core's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron.pipeline.planner.planning import plan
from megatron.pipeline.planner.planning.costs import CostFlags, costs_of
from megatron.pipeline.planner.planning.document import is_csv, naming, schedule_of
from megatron.pipeline.planner.schedule.certify.certificate import Certificate, TransportOutcome, certify
from megatron.pipeline.planner.schedule.certify.megatron import megatron_1f1b, megatron_interleaved
from megatron.pipeline.planner.schedule.certify.torch_comms import from_comms_csv, has_messages, without_weights
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.cutting import with_shards
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.traffic import Traffic, of_programs
from megatron.pipeline.planner.schedule.rules.boundary import verify_boundary
from megatron.pipeline.planner.schedule.rules.deadlock import Hang
from megatron.pipeline.planner.schedule.rules.transports import TRANSPORTS, TransportModel
from megatron.pipeline.planner.schedule.rules.verify import verify_passes

__all__ = [
    "TRANSPORTS",
    "Certificate",
    "Hang",
    "TrafficSource",
    "TransportModel",
    "TransportOutcome",
    "megatrons",
    "read_traffic",
]


class TrafficSource(NamedTuple):
    """Traffic with its costs, and ``how`` its messages came to stand where they do, in words."""

    traffic: Traffic
    costs: Costs
    how: str

    def certify(self, transports: Iterable[TransportModel], cold: bool) -> Certificate:
        """See ``certificate.certify``."""
        return certify(self.traffic, self.costs, transports, cold)


def read_traffic(path: str, flags: CostFlags) -> TrafficSource:
    """The traffic of a schedule from a JSON or CSV file; passes alone are lowered as training does it.

    Raises:
        ValueError: the file cannot be read, is malformed, or lacks a pass that another needs, or passes wait for each other in a
            circle; the message names the file.
    """

    def traffic_of(text: str) -> TrafficSource:
        if is_csv(path) and has_messages(text):
            traffic = from_comms_csv(text, Path(path).stem)
            return TrafficSource(traffic, costs_of(flags, traffic.placement), "messages as the file has them")
        schedule, file = schedule_of(path, without_weights(text) if is_csv(path) else text)
        verify_passes(schedule, forward_only=all(kind.is_forward for row in schedule.rows for kind in row.kinds))
        verify_boundary(schedule)
        costs = costs_of(flags, schedule.placement, file, copies=schedule.has_copies)
        costs = with_shards(costs, schedule.vocabulary, schedule.ranks)
        return TrafficSource(of_programs(schedule, lower(schedule, costs)), costs, "messages where training has them")

    return naming(path, traffic_of)


def megatrons(flags: CostFlags, sizes: tuple[int, int], chunks: int | None, overlap: bool, shapes: bool) -> TrafficSource:
    """The traffic of megatron-core's own interleaved schedule on ranks with microbatches; of one chunk 1F1B, never overlapped."""
    one = chunks == 1
    schedule = plan("1f1b", *sizes) if one else plan("interleaved", *sizes, chunks=chunks)
    traffic = megatron_1f1b(schedule, shapes) if one else megatron_interleaved(schedule, overlap, shapes)
    return TrafficSource(traffic, costs_of(flags, traffic.placement), "messages where megatron-core has them")
