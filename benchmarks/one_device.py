"""What benchmarks of one rank share: its device, the GPU if there is one, and the time of work on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from megatron.pipeline import patches

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, one thread"


def one_rank() -> None:
    """Patched megatron-core on one thread, in a world of this process alone."""
    patches.install()
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("localhost", 0, 1, True)
    torch.distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until the device has done all of some work, which begins when it is idle; and what that returns."""
    synchronize()
    start = time.perf_counter()
    result = work()
    synchronize()
    return time.perf_counter() - start, result
