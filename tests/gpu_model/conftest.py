"""Ranks with a device each that poses; they stay so, and are no other test's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool

from gpu_model.ranks import posing_rank


@pytest.fixture(scope="session")
def gpus() -> Iterator[Pool]:
    ranks = Pool(posing_rank)
    yield ranks
    ranks.close()
