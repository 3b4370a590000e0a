"""A line for the log about what a schedule moves to host memory."""

from __future__ import annotations

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks
from megatron.pipeline.planner.schedule.transforms.offload import host_peaks, moved
from megatron.pipeline.planner.schedule.transforms.transform import without_copies

_MIB = 2**20


def copies_in_words(schedule: Schedule, costs: Costs, in_bytes: bool, limited: bool) -> str:
    """Say how much goes to host memory, and how much stays on the device: the most on any rank, and the rank that saves most.

    Args:
        in_bytes: the costs' unit of memory; else it is a microbatch of a rank.
        limited: there is a limit of host memory.
    """
    if not schedule.has_copies:
        within = " within --offload-host-memory" if limited else ""
        return f"nothing goes to host memory: no copy lowers a rank's peak and can be back in time{within}"
    unit, name = (_MIB, "MiB") if in_bytes else (1, "microbatches")
    held, without = activation_peaks(schedule, costs), activation_peaks(without_copies(schedule), costs)
    best = max(range(schedule.ranks), key=lambda rank: without[rank] - held[rank])
    amounts = max(moved(schedule, costs)), max(host_peaks(schedule, costs)), max(held), max(without), held[best], without[best]
    away, most, now, before, least, whole = (f"{amount / unit:.4g}" for amount in amounts)
    return (
        f"up to {away} {name} per rank go to host memory in an iteration, at most {most} at a time; peak on the device {now} "
        f"{name} instead of {before}, on rank {best} {least} instead of {whole}"
    )
