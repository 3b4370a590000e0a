"""Input of ``mpipe certify``: any schedule as traffic between ranks, with the costs that its times follow from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from megatron.pipeline.planner.planning.costs import CostFlags, costs_of, with_shards
from megatron.pipeline.planner.planning.document import is_csv, naming, schedule_of
from megatron.pipeline.planner.schedule.certify.torch_comms import from_comms_csv, has_messages, without_weights
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.traffic import Traffic, of_programs
from megatron.pipeline.planner.schedule.rules.boundary import verify_boundary
from megatron.pipeline.planner.schedule.rules.verify import verify_passes


class TrafficSource(NamedTuple):
    """Traffic with its costs, and ``how`` its messages came to stand where they do, in words."""

    traffic: Traffic
    costs: Costs
    how: str


def read_traffic(path: str, flags: CostFlags) -> TrafficSource:
    """The traffic of a schedule from a JSON or CSV file.

    Passes alone are lowered as training does it.

    Raises:
        ValueError: the file cannot be read, is malformed, or lacks a pass that another needs, or passes wait for each other in a
            circle; the message names the file.
    """
    return naming(path, lambda text: _read(path, text, flags))


def _read(path: str, text: str, flags: CostFlags) -> TrafficSource:
    if is_csv(path) and has_messages(text):
        traffic = from_comms_csv(text, Path(path).stem)
        return TrafficSource(traffic, costs_of(flags, traffic.placement), "messages as the file has them")
    schedule, file = schedule_of(path, without_weights(text) if is_csv(path) else text)
    verify_passes(schedule, forward_only=all(kind.is_forward for row in schedule.rows for kind in row.kinds))
    verify_boundary(schedule)
    costs = costs_of(flags, schedule.placement, file, copies=schedule.has_copies)
    costs = with_shards(costs, schedule.vocabulary, schedule.ranks)
    return TrafficSource(of_programs(schedule, lower(schedule, costs)), costs, "messages where training has them")
