"""megatron.core.dist_checkpointing.strategies.filesystem_async: what writes checkpoints.

``_get_write_results_queue``: upstream keeps a process for a queue, from a rank's first save on. A rank that is killed would leave
it behind, and with it the process that tracks multiprocessing's resources, which ends with the last that uses it. Here it ends
with the rank.
"""

from __future__ import annotations

import multiprocessing
from functools import cache
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.pipeline.patches import compat

from megatron.pipeline.dist.processes import end_with_parent


def install() -> None:
    """Replace it, where it is there: releases from 0.17 on have none."""
    module = compat.module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if hasattr(module, "_get_write_results_queue"):
        module._get_write_results_queue = _results_queue


@cache
def _results_queue() -> Any:
    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    manager.start(initializer=end_with_parent)
    return manager.Queue()
