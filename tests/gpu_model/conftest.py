"""Ranks with a device each that poses, in worlds with NCCL's rules; they stay so, and are no other test's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool

from gpu_model import pose


@pytest.fixture(scope="session")
def gpus() -> Iterator[Pool]:
    ranks = Pool("nccl", pose)
    yield ranks
    ranks.close()
