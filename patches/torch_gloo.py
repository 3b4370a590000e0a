"""torch.distributed.distributed_c10d: process groups of gloo.

``ProcessGroupGloo``: every group opens a device of its own, whose thread wakes up a hundred times a second. megatron-core makes
some 25 groups a rank, so ranks that share the cores of one machine lose a tenth of them. Here all groups of a process share one
device. Every group also has two threads that run collectives. Each writes the name of what it has completed into the same string
of the group without a lock (``runLoop`` of ProcessGroupGloo.cpp, in torch 2.13 too); names of more than 15 letters are on the
heap, as that of the gathers of ``--overlap-param-gather`` is, and two at once free it twice: the rank dies with "malloc():
unaligned tcache chunk detected". Here a group has one thread, which runs its collectives in the order in which ranks begin them.
torch has no setting for either. Its options and devices are private: a torch without them keeps its own way.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch.distributed import distributed_c10d


def install() -> None:
    """Replace it, where there is no GPU; do nothing otherwise, or when it is done already."""
    module: Any = distributed_c10d
    original = module.ProcessGroupGloo
    known = hasattr(original, "create_default_device") and hasattr(original, "_Options")
    if torch.cuda.is_available() or original.__module__ == __name__ or not known:
        return

    class OneDevice(original):  # type: ignore[misc, valid-type]
        __module__ = __name__

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            options = original._Options()
            options._devices, options._timeout, options._threads = [_device()], timeout, 1
            super().__init__(store, rank, size, options)

    module.ProcessGroupGloo = OneDevice


@cache
def _device() -> Any:
    return distributed_c10d.ProcessGroupGloo.create_default_device()
