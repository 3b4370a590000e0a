"""Ranks of a pool that believe they have a GPU each, in worlds with NCCL's rules."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from pool import forked, serve


def posing_rank(connection: Connection, stacks: str) -> BaseProcess:
    """For ``Pool``."""
    return forked(_pose_and_serve, connection, stacks)


def another_world(**options: Any) -> None:
    """Begin anew with other options of ``init_process_group``; on another port, or a rank that is quick meets the old world."""
    import torch

    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    torch.distributed.init_process_group(**options)


def _pose_and_serve(connection: Connection, stacks: str) -> None:
    from gpu_model import pose

    pose()
    from megatron.pipeline.monitor import device_progress

    # A host that waits for its device now and then, which bounds memory, would hide what no stream orders.
    device_progress.DeviceProgress.catch_up = lambda _: None  # type: ignore[method-assign, assignment]
    serve(connection, stacks, "nccl")
