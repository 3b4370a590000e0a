"""Shared by the tests of offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import pytest
import torch
from runtime.offloaded import Layer

from megatron.pipeline.monitor.memory import ActivationMeter
from megatron.pipeline.runtime.offload.copy_streams import ThreadCopyStreams

Observing = Callable[[Iterable[torch.Tensor]], ActivationMeter]


@pytest.fixture
def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(True), Layer(False))


@pytest.fixture
def streams() -> Iterator[ThreadCopyStreams]:
    some = ThreadCopyStreams()
    yield some
    some.close()


@pytest.fixture
def observing() -> Iterator[Observing]:
    """Makes a meter that counts, until the test ends, what outlives a pass; given parameters."""
    with ExitStack() as stack:

        def make(parameters: Iterable[torch.Tensor]) -> ActivationMeter:
            meter = ActivationMeter(parameters)
            stack.enter_context(meter.observing())
            return meter

        yield make
