"""Autograd functions that run beside the passes' stream, with every wait that their forwards need.

Autograd then runs their backwards on that stream, too, and orders what flows from node to node. What a backward leaves elsewhere,
for a pass to take, autograd does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves


def aside(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call on another stream, in order with what is before and behind it."""

    def called(*given: Any, **more: Any) -> Any:
        side, here = _side(), torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            result = call(*given, **more)
        here.wait_stream(side)
        for tensors, reader in ((given, side), (result, here)):
            for tensor in tree_leaves(tensors):
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    tensor.record_stream(reader)
        return result

    return called


@cache
def _side() -> Any:
    return torch.cuda.Stream()


@contextmanager
def linears_aside() -> Iterator[None]:
    from megatron.pipeline.backward.linear import SplitLinear

    with patch.object(SplitLinear, "apply", aside(SplitLinear.apply)):
        yield


@contextmanager
def first_stage_aside() -> Iterator[None]:
    """What catches the gradient of a vocabulary's embeddings."""
    from megatron.pipeline.runtime.vocabulary import _Catch

    with patch.object(_Catch, "apply", aside(_Catch.apply)):
        yield


@contextmanager
def ddp_aside() -> Iterator[None]:
    """DDP is made on a stream of its own, as Megatron-LM's ``get_model`` does: there autograd adds up what no W does."""
    from megatron.pipeline.model import build

    with patch.object(build, "DistributedDataParallel", aside(build.DistributedDataParallel)):
        yield
