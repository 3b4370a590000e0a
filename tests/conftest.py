"""Shared by all tests: their order, who sees a GPU, the pools of ranks, started once, and a small corpus."""

from __future__ import annotations

import gc
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import examples  # noqa: F401  # loads the default profile of hypothesis
import gpus
import pytest
from pool import Pool, rank_beside_others, rank_with_gpu

# Files and folders of which every test has the mark ``rest``: what checks the checkers, the pages, browsers.
CHECKERS = ("browser", "engine", "gpu_model", "schedule/test_exact.py", "test_docs.py", "test_docs_site.py", "test_gpus.py")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported and found: nothing of it dies
    os.environ["MEGATRON_PIPELINE_PLANS"] = "off"  # what is tested is planned
    if not gpus.alone(config.getoption("markexpr")):
        gpus.hide()


def pytest_collection_finish() -> None:
    gc.freeze()  # no test looks through it
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures, which may use a GPU
def pytest_runtest_setup(item: pytest.Item) -> None:
    if (mark := item.get_closest_marker("cuda")) is None:
        return
    import torch

    reason = gpus.missing(mark.kwargs.get("devices", 1), item.config.getoption("markexpr"), torch.cuda.device_count())
    if reason is not None:
        pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is in ``CHECKERS``, and puts tests in order.

    Tests that start torchrun go first, then modules whose tests run on the pool of ranks, then what computes in one process.

    Workers of ``--dist worksteal`` (``make test``) begin with parts of this order, and one that is done takes over the end of
    another's part: what is long, and mostly waits for processes to start, runs beside the rest and is not left for the end.
    """

    def place(item: pytest.Item) -> int:
        if item.get_closest_marker("slow") is not None:
            return 0
        return 1 if item.path in on_the_pool else 2

    checkers = {Path(__file__).parent / name for name in CHECKERS}
    marked = {path for path in {item.path for item in items} if not checkers.isdisjoint([path, *path.parents])}
    for item in items:
        if item.path in marked:
            item.add_marker("rest")
    on_the_pool = {item.path for item in items if "pool" in getattr(item, "fixturenames", ())}
    items.sort(key=place)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """``pool.run(ranks, function, *args)``: see pool.py."""
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def nccl() -> Iterator[Pool]:
    """As ``pool``, with a GPU for every rank, in worlds of NCCL. Tests that use it are marked ``cuda(devices=ranks)``."""
    ranks = Pool(rank_with_gpu, start_up=120)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def sharing() -> Iterator[Pool]:
    """As ``pool``, with all ranks on the first GPU, or on as many as there are; messages go through host memory."""
    ranks = Pool(rank_beside_others, start_up=120)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a training on some of the standard library's source code, read in less time than Megatron's mock data is drawn."""
    import corpus  # imports megatron.core, for seconds

    directory = tmp_path_factory.mktemp("data")
    documents = corpus.read_documents(corpus.standard_library(200_000), ["text"], "surrogateescape")
    args = Namespace(tokenizer_type="ByteLevelTokenizer")
    corpus.write_dataset(documents, str(directory / "stdlib"), ["text"], args, True, 1, lambda _: None)
    return f"--data-path {directory}/stdlib_text_document"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a page server that all tests of a module ask."""
    from served import serving

    with serving() as (address, _):
        yield address
