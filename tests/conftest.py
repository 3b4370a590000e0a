"""Shared by all tests: the pool of ranks, started once, and a small corpus."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import pytest
from pool import Pool

from megatron.pipeline.trainer import corpus


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """``pool.run(ranks, function, *args)``: see pool.py."""
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a training on some of the standard library's source code, read in less time than Megatron's mock data is drawn."""
    directory = tmp_path_factory.mktemp("data")
    documents = corpus.read_documents(corpus.standard_library(200_000), ["text"], "surrogateescape")
    args = Namespace(tokenizer_type="ByteLevelTokenizer")
    corpus.write_dataset(documents, str(directory / "stdlib"), ["text"], args, True, 1, lambda _: None)
    return f"--data-path {directory}/stdlib_text_document"
