"""Shared by all tests: the pool of ranks, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """``pool.run(ranks, function, *args)``: see pool.py."""
    ranks = Pool()
    yield ranks
    ranks.close()
