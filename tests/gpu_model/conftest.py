"""Ranks with a device each that poses; they stay so, and are no other test's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from pool import Pool

from gpu_model import shim
from gpu_model.ranks import posing_rank, rank_without_numbers


@pytest.fixture(scope="session")
def gpus() -> Iterator[Pool]:
    ranks = Pool(posing_rank)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def engines(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Ranks whose tensors have no numbers, and whose autograd has streams; skipped where the shim cannot be built."""
    cache = getattr(pytestconfig, "cache", None)
    try:
        library = shim.build(cache.mkdir("gpu_model") if cache else tmp_path_factory.mktemp("shim"))
    except shim.NoCompiler as error:
        pytest.skip(str(error))
    ranks = Pool(partial(rank_without_numbers, library))
    yield ranks
    ranks.close()
