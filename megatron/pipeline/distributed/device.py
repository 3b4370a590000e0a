"""Device of this rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


def this_device() -> torch.device:
    """The GPU that this process has set, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def local_device(rehearses: bool) -> tuple[int, bool]:
    """The number of this rank's GPU, and whether it is other ranks' too: in a rehearsal with more ranks than GPUs."""
    place, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = rehearses and torch.cuda.is_available() and ranks > torch.cuda.device_count()
    return (place % torch.cuda.device_count() if shared else place), shared


def device_memory(device: torch.device) -> int:
    """Bytes of a GPU, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gpu_name() -> str | None:
    """CUDA's name of this process's GPU; None without one."""
    return torch.cuda.get_device_name(this_device()) if torch.cuda.is_available() else None


def to_device(numbers: Sequence[float]) -> torch.Tensor:
    """Numbers as a float64 tensor on this process's device; on a GPU the host does not wait for the copy."""
    device = this_device()
    on_gpu = device.type == "cuda"
    return torch.tensor(numbers, dtype=torch.float64, pin_memory=on_gpu).to(device, non_blocking=on_gpu)


def side_stream(device: torch.device, purpose: str = "collectives") -> AbstractContextManager[Any]:
    """Start work on a GPU that neither waits for what computes nor keeps it waiting; one stream for each purpose."""
    return torch.cuda.stream(_stream(device, purpose)) if device.type == "cuda" else nullcontext()


@cache  # the allocator keeps memory for every stream, and torch has 32 in all, of which NCCL's are some
def _stream(device: torch.device, _purpose: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
