"""Shared by all tests: their order, the pool of ranks, started once, and a small corpus."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import examples  # noqa: F401  # loads the default profile of hypothesis
import pytest
from pool import Pool

from megatron.pipeline.trainer import corpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules whose tests start several processes go first.

    With ``-n 2`` (``make test``) and ``--dist worksteal`` one worker begins with them and the other behind the middle, with what
    computes in one process, so that two worlds of ranks run at the same time at most at the end.
    """

    def starts_processes(item: pytest.Item) -> bool:
        return "pool" in getattr(item, "fixturenames", ()) or item.get_closest_marker("slow") is not None

    first = {item.path for item in items if starts_processes(item)}
    items.sort(key=lambda item: item.path not in first)


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
