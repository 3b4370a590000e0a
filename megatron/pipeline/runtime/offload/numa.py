"""Binds this process to the CPUs of its GPU's NUMA node, so that host memory that it touches first lies there too."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_SYSTEM = Path("/sys")  # where the system describes its hardware


def bind(device: torch.device) -> str:
    """Bind all threads that this process has by now, and those to come. Call it before host memory is allocated.

    Never raises: a training runs without it, only slower.

    Returns:
        A line for the log: what was bound, or why nothing was.
    """
    if device.type != "cuda":
        return "NUMA: nothing bound: this process computes on the CPU"
    try:
        return f"NUMA: {_bind(device)}"
    except Exception as error:  # training goes on without binding
        return f"NUMA: nothing bound: {type(error).__name__}: {error}"


def _bind(device: torch.device) -> str:
    index = torch.cuda.current_device() if device.index is None else device.index
    properties: Any = torch.cuda.get_device_properties(index)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    node = int((_SYSTEM / "bus/pci/devices" / address / "numa_node").read_text())
    if node < 0:
        return f"nothing bound: the system does not say which node GPU {index} ({address}) is next to"
    near = cpus((_SYSTEM / f"devices/system/node/node{node}/cpulist").read_text())
    allowed = os.sched_getaffinity(0)
    if allowed <= near:
        return f"nothing to bind: all {len(allowed)} CPUs of this process are on node {node}, next to GPU {index}"
    if not allowed & near:
        return f"nothing bound: this process may not use the CPUs of node {node}, next to GPU {index}"
    os.sched_setaffinity(0, allowed & near)
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it may have ended
            if os.sched_getaffinity(int(thread)) == allowed:  # it has not been bound to others
                os.sched_setaffinity(int(thread), allowed & near)
    return f"bound to {len(os.sched_getaffinity(0))} CPUs of node {node}, next to GPU {index} ({address})"


def cpus(ranges: str) -> set[int]:
    """The numbers in a list such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
