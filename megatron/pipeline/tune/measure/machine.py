"""Speed at which one rank of this machine multiplies matrices and moves memory while all others do the same."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron.pipeline.distributed.device import device_memory
from megatron.pipeline.runtime.offload import probe
from megatron.pipeline.runtime.offload.offloading import CopySettings, Offloading
from megatron.pipeline.tune.measure.clock import MeasureClock, repeated, seconds

_WIDTH = {"cuda": 8192, "cpu": 1024}  # of square matrices that are large enough for the best speed
_GATHERED = 2**26  # bytes of all ranks
_COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes, more than caches hold


def peak(kind: torch.dtype, device: torch.device, iterations: int) -> float:
    """Operations per second of a large product."""
    return 2 * _WIDTH[device.type] ** 3 / _seconds(device, _product(kind, device), iterations)


def beside_communication(kind: torch.dtype, device: torch.device, iterations: int) -> float | None:
    """Seconds of a large product while all ranks gather, over those of one alone; None where nothing runs beside communication,
    with one rank or without GPUs. Collective over the world."""
    ranks = torch.distributed.get_world_size()
    if device.type != "cuda" or ranks == 1:
        return None
    multiply, part = _product(kind, device), torch.zeros(_GATHERED // ranks, dtype=torch.uint8, device=device)
    whole, clock, side = part.new_empty(ranks * part.numel()), MeasureClock(device), torch.cuda.Stream(device)

    def gather() -> None:
        torch.distributed.all_gather_into_tensor(whole, part)

    alone, each = (seconds(clock, action, iterations, warm_up=2) for action in (multiply, gather))
    most = torch.tensor(2 * alone / each, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    count = 1 + int(most.item())  # that take longer than a product beside them

    def parts() -> list[Any]:
        stream = torch.cuda.current_stream(device)
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            for _ in range(count):
                gather()
        marks = [clock.mark()]
        multiply()
        marks.append(clock.mark())
        stream.wait_stream(side)
        return marks

    return max(1.0, repeated(clock, parts, iterations, warm_up=2)[0] / alone)


def bandwidth(device: torch.device, iterations: int) -> float:
    """Bytes per second of memory, read and written, of a large copy."""
    source, target = (torch.zeros(_COPIED[device.type], dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * source.numel() / _seconds(device, lambda: target.copy_(source), iterations)


def host_copies(device: torch.device, host: str) -> tuple[float, float]:
    """Bytes per second to host memory and back; the same on all ranks. Collective over the world."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    offloading = Offloading(CopySettings(), device)
    costs = probe.measure(offloading, host, rank, ranks)
    offloading.copy_streams.close()
    return probe.MARGIN / costs.to_host, probe.MARGIN / costs.to_device


def memory(device: torch.device, ranks: int) -> float:
    """Bytes of the GPU; without one, this machine's share for each of the ranks."""
    return device_memory(device) / (1 if device.type == "cuda" else ranks)


def name(device: torch.device, ranks: int) -> str:
    """Name of the GPU, or of the processor and how many ranks share it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {ranks} {'rank' if ranks == 1 else 'ranks'}"


def _product(kind: torch.dtype, device: torch.device) -> Callable[[], object]:
    width = _WIDTH[device.type]
    one, other, product = (torch.randn(width, width, device=device).to(kind) for _ in range(3))
    return lambda: torch.mm(one, other, out=product)


def _seconds(device: torch.device, action: Callable[[], object], iterations: int) -> float:
    """Best time, as what the hardware can do."""
    return seconds(MeasureClock(device), action, iterations, warm_up=2, which=min)
