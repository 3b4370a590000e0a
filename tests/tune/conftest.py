"""Shared by the tests of measuring."""

from __future__ import annotations

from argparse import Namespace

import pytest
from tune.measured_ranks import MODEL

from megatron.pipeline.cli import tune_measure
from megatron.pipeline.planner.costmodel import device
from megatron.pipeline.planner.costmodel.device import Device


@pytest.fixture
def args() -> Namespace:
    return tune_measure._model([*MODEL, "--group-query-attention", "--num-query-groups", "2"])


@pytest.fixture
def base() -> Device:
    return device.named("A100-80GB")
