"""Autograd's own engine on streams, without numbers: no race, no read of the device, and what only this way reports."""

from __future__ import annotations

import pytest
from marked import whole
from pool import Pool

from gpu_model.driven import DRIVES, ENGINE, MUTATIONS, TRAININGS, drive, train
from gpu_model.recorded import stuck

DAILY = ("V, one barrier", "offload", "linears aside")


def some(names: tuple[str, ...] | list[str], daily: tuple[str, ...]) -> list[object]:
    return [name if name in daily else whole(name) for name in names]


@pytest.mark.parametrize("name", some([*DRIVES], DAILY))
def test_nothing_races_or_reads_the_device(engines: Pool, name: str) -> None:
    reports = engines.run(DRIVES[name].ranks, drive, name)
    assert [(one.races, one.reads) for one in reports] == [([], [])] * len(reports)
    assert stuck([one.trace for one in reports]) == []
    followed = [one.engine.get("_follows", 0) for one in reports]
    assert any(followed) if "aside" in name else not any(followed)


@pytest.mark.parametrize("name", some([*MUTATIONS], ("a copy of the output's gradient",)))
def test_what_a_backward_leaves_without_a_wait_is_reported(engines: Pool, name: str) -> None:
    drives, _ = MUTATIONS[name]
    assert any(one.races for one in engines.run(DRIVES[drives].ranks, drive, drives, name))


@pytest.mark.whole
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_other_way_does_not_see_it(gpus: Pool, name: str) -> None:
    """There a backward runs on the stream of who calls it."""
    drives, _ = MUTATIONS[name]
    assert not any(one.races for one in gpus.run(DRIVES[drives].ranks, drive, drives, name))


@pytest.mark.parametrize("without", some([*ENGINE], ("_follows",)))
def test_what_the_engine_does_counts(engines: Pool, without: str) -> None:
    assert any(one.races for one in engines.run(2, drive, "linears aside", without=without))


def test_every_read_is_found(engines: Pool) -> None:
    """Of 4 microbatches, 2 layers and 4 linears."""
    for one in engines.run(2, drive, "line", "a read"):
        assert len(one.reads) >= 4 * 2 * 4 and set(map(line_less, one.reads)) == {"backward/linear.py"}, one.reads


def line_less(place: str) -> str:
    return place.partition(":")[0]


@pytest.mark.parametrize("name", some([*TRAININGS], ("rolled back",)))
def test_a_training_neither_races_nor_reads_the_device_in_its_passes(engines: Pool, data: str, name: str) -> None:
    reports = engines.run(2, train, name, data)
    assert [(one.races, one.reads) for one in reports] == [([], [])] * 2
    assert stuck([one.trace for one in reports]) == []
    for one in reports:
        assert one.engine["restored"] == (3 if name.startswith("rolled back") else 0)
