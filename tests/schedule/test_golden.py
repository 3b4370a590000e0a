"""What is planned for several hundred problems stays what it was: golden.py has them, and writes the file anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from schedule.golden import difference, digests, read
from schedule.golden_cases import SHAPES, Case, cases, part

from megatron.pipeline.planner.schedule import families


def _check(chosen: Mapping[str, Case]) -> None:
    kept = read()
    found = difference({key: kept[key] for key in chosen if key in kept}, {key: digests(case) for key, case in chosen.items()})
    assert not found, f"{found}\nif that is meant: .venv/bin/python -m tests.schedule.golden --write"


def test_some_plans_are_what_they_were() -> None:
    _check(part(cases()))


@pytest.mark.rest
def test_more_plans_are_what_they_were() -> None:
    some, more = part(cases()), part(cases(), more=True)
    _check({key: case for key, case in more.items() if key not in some})


@pytest.mark.whole
def test_all_other_plans_are_what_they_were() -> None:
    every = cases()
    more = part(every, more=True)
    _check({key: case for key, case in every.items() if key not in more})


def test_the_file_has_all_cases_and_some_of_every_family() -> None:
    every = cases()
    assert list(read()) == list(every)
    assert set(SHAPES) == set(families.FAMILIES)
    for chosen, least in ((every, 4), (part(every, more=True), 4), (part(every), 1)):
        counts = Counter(case.family for case in chosen.values())
        assert all(counts[family] >= least for family in SHAPES)
