"""An all-reduce that is started now and whose result is read later, without waiting for what the GPU computes meanwhile."""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron.pipeline.distributed.device import side_stream


class Reduction:
    """A few numbers on their way to all ranks of a group.

    Args:
        numbers: a tensor of one dimension, on the device that the group's backend works on. It must stay as it is.
        operation: of ``torch.distributed.ReduceOp``.
        group: None for the world.
    """

    def __init__(self, numbers: torch.Tensor, operation: Any, group: Any = None) -> None:
        self._numbers = numbers
        self._work = torch.distributed.all_reduce(numbers, op=operation, group=group, async_op=True)

    def wait(self) -> list[float]:
        """The result, once every rank of the group has started its part."""
        if self._numbers.is_cuda:
            # The current stream is full of forwards that run ahead: it must not wait, and a read in it would come after them.
            while not self._work.is_completed():
                time.sleep(1e-5)
        else:
            self._work.wait()
        with side_stream(self._numbers.device):
            return self._numbers.tolist()
