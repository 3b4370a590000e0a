"""The model of time and memory against what was published: throughput within 5 % of its column's baseline, memory within 10 %."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import published
import pytest
from published_figures import A100, H100
from published_throughput import SHARE, narrowest

from megatron.pipeline.planner.costmodel.device import named

pytestmark = pytest.mark.rest  # 64 plans at published sizes


@pytest.fixture(scope="module")
def found() -> list[published.Cell]:
    return published.cells(named(A100))


def test_every_cell_is_predicted(found: list[published.Cell]) -> None:
    assert Counter(cell.source for cell in found) == {"Zero Bubble": 24, "Vocabulary Parallelism": 40}
    for cell in found:
        assert abs(cell.relative_error) <= 0.05, cell
        assert abs(cell.memory.error) <= 0.1, cell


def test_efficiencies_are_fitted(found: list[published.Cell]) -> None:
    """A100's file has, to the third digit, the one at which its sources' mean deviation is 0; H100's is of others, too."""
    device = named(A100)
    assert abs(published.imbalance(device, found)) < 0.0005 / device.efficiency + 2e-4
    assert [len(published.deviations(named(name), cells)) for name, cells in ((A100, found), (H100, []))] == [3, 1]
    assert all("fitted" in named(name).source for name in (A100, H100))


def test_fitting_finds_the_efficiency_again() -> None:
    device = published.fitted(named(H100))
    assert published.fitted(replace(device, efficiency=0.9)).efficiency == device.efficiency


def test_the_documents_have_the_fit_and_what_is_gained(found: list[published.Cell]) -> None:
    """All cells are printed by the program."""
    text = "".join(document.read_text(encoding="utf-8") for document in published.DOCUMENTS)
    fit, *_, gained = published.tables(found)
    for table in (fit, gained, published.summary(found)):
        assert table in text


def test_a_range_holds_for_one_more() -> None:
    """All of few; of many alike, one more lies in it about as often as ``SHARE`` says."""
    assert narrowest([1.2, 0.8, 1.0]) == (0.8, 1.2)
    draw = random.Random(0)
    for count in (19, 35, 99):
        inside = 0
        for _ in range(1000):
            *known, more = (draw.lognormvariate(0.0, 0.2) for _ in range(count + 1))
            low, high = narrowest(known)
            inside += low <= more <= high
        assert inside / 1000 > SHARE - 0.04
