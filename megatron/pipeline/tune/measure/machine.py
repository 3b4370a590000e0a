"""Speed at which one rank of this machine multiplies matrices and moves memory while all others do the same."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from megatron.pipeline.dist.device import device_memory
from megatron.pipeline.runtime.offload import probe
from megatron.pipeline.runtime.offload.offloading import Offloading, Settings
from megatron.pipeline.tune.measure.clock import MeasureClock, seconds

_WIDTH = {"cuda": 8192, "cpu": 1024}  # of square matrices that are large enough for the best speed
_COPIED = {"cuda": 2**30, "cpu": 2**26}  # bytes, more than caches hold


def peak(kind: torch.dtype, device: torch.device, iterations: int) -> float:
    """Operations per second of a large product."""
    width = _WIDTH[device.type]
    one, other, product = (torch.randn(width, width, device=device).to(kind) for _ in range(3))
    return 2 * width**3 / _seconds(device, lambda: torch.mm(one, other, out=product), iterations)


def bandwidth(device: torch.device, iterations: int) -> float:
    """Bytes per second of memory, read and written, of a large copy."""
    source, target = (torch.zeros(_COPIED[device.type], dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * source.numel() / _seconds(device, lambda: target.copy_(source), iterations)


def host_copies(device: torch.device, host: str) -> tuple[float, float]:
    """Bytes per second to host memory and back; the same on all ranks. Collective over the world."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    offloading = Offloading(Settings(), device)
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


def _seconds(device: torch.device, action: Callable[[], object], iterations: int) -> float:
    """Best time, as what the hardware can do."""
    return seconds(MeasureClock(device), action, iterations, warm_up=2, which=min)
