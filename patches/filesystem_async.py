"""megatron.core.dist_checkpointing.strategies.filesystem_async: what writes checkpoints.

``get_write_results_queue`` (``_get_write_results_queue`` up to 0.16): upstream keeps a process for a queue, from a rank's first
save on. A rank that is killed would leave it behind, and with it the process that tracks multiprocessing's resources, which ends
with the last that uses it. Here it ends with the rank, and not before: torchrun sends SIGTERM to all processes of a rank, which
then saves a checkpoint.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from functools import cache
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.pipeline.patches import compat

from megatron.pipeline.planner import end_with_parent


def install() -> None:
    module = compat.module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    for name in ("_get_write_results_queue", "get_write_results_queue"):
        if hasattr(module, name):
            setattr(module, name, _results_queue)


class _Results:
    """A queue of what writers have written, which its process keeps as bytes. Can be sent to another process."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, result: Any) -> None:
        self._queue.put(pickle.dumps(result))

    def get_nowait(self) -> Any:
        return pickle.loads(self._queue.get_nowait())


@cache
def _manager(mp_mode: str) -> SyncManager:
    manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
    manager.start(initializer=end_with_parent, initargs=(signal.SIGTERM,))
    return manager


def _results_queue(mp_mode: str = "spawn") -> _Results:
    return _Results(_manager(mp_mode).Queue())
