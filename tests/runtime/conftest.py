"""Shared by the tests of offloading."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from runtime.offloaded import Layer

from megatron.pipeline.runtime.offload.lanes import ThreadLanes


@pytest.fixture
def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(True), Layer(False))


@pytest.fixture
def lanes() -> Iterator[ThreadLanes]:
    some = ThreadLanes()
    yield some
    some.close()
