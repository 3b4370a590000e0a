"""A limit that is too low is worded once, in the unit in which it was given."""

from __future__ import annotations

import pytest

from megatron.pipeline.planner.planning.choose import candidates
from megatron.pipeline.planner.planning.planned import Variant
from megatron.pipeline.planner.planning.refusals import (
    COSTS_UNIT,
    HOST_MIB,
    MIB,
    MICROBATCHES,
    Bytes,
    Refusal,
    Unit,
    folded,
    nothing_fits,
    read_amount,
)
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow
from megatron.pipeline.planner.schedule.families import AUTO


@pytest.mark.parametrize(
    ("unit", "least", "limit", "words"),
    [
        (MICROBATCHES, 3.0, 2.5, "needs 3 microbatches, limit 2.5"),
        (COSTS_UNIT, 3.0, 2.5, "needs 3, limit 2.5"),
        (MIB, 3.5 * 2**20, 2**20, "needs 3.5MiB, limit 1MiB"),
        (Unit("GiB", 2**30), 2**31, 2**30, "needs 2GiB, limit 1GiB"),
        (Unit("", 4.0), 3.0, 2.0, "needs 0.75, limit 0.5"),  # shares of 1F1B's peak
    ],
)
def test_needs_are_in_the_unit_of_the_limit(unit: Unit, least: float, limit: float, words: str) -> None:
    refusal = Refusal(Variant("zb-v"), "zb-v holds too much", least)
    assert refusal.short(unit, limit) == words
    assert refusal.short(unit, None) == "holds too much", "the family is in a column of its own"


def test_a_limit_that_is_taken_from_a_message_suffices() -> None:
    for least in (1 / 3, 2 / 3 * 2**20, 1234567.9):
        assert float(COSTS_UNIT.at_least(least)) >= least * (1 - 1e-9)
    assert HOST_MIB.at_least(2**20) == "1.15MiB", "host memory is rounded up"


def test_what_is_too_little() -> None:
    share = Unit("", 4.0)
    error = share.too_little("--pipeline-memory-limit 0.5", "zb-v", 4.0)
    assert str(error) == "--pipeline-memory-limit 0.5 is too little for zb-v, which needs 1: raise it"
    error = MIB.too_little("--pipeline-memory-limit 1MiB", "zb-v", 2**21, ["v-half", "v-min"])
    assert str(error).endswith(" zb-v, which needs 2MiB: raise it, or take v-half or v-min, which can hold less")


def test_nothing_fits() -> None:
    refused = candidates(Request(AUTO, 4, 8, memory_limit=0.5), [Variant("1f1b"), Variant("v-auto")])[1]
    error = nothing_fits(refused, MICROBATCHES, 0.5)
    assert isinstance(error, LimitTooLow) and error.least == 1
    assert str(error) == (
        "no schedule fits within a memory of 0.5 microbatches: the least that one needs is 1, for v-auto; raise --memory-limit "
        "to that"
    )


def test_the_same_reason_is_given_once() -> None:
    tried = [Variant("interleaved", 2), Variant("1f1b"), Variant("zb-h1", 2)]
    refused = candidates(Request(AUTO, 4, 0), tried)[1]
    assert folded(refused, COSTS_UNIT, None) == [
        "interleaved v=2, 1f1b: a schedule needs at least 1 microbatch, got 0",
        "zb-h1 v=2: has 1 chunk per rank, got 2",
    ]
    many = [Refusal(Variant(f"a{number}"), "is too long") for number in range(7)]
    assert folded(many, COSTS_UNIT, None) == ["a0, a1, a2, a3, a4, a5 and 1 more: is too long"]
    assert str(nothing_fits(many, COSTS_UNIT, None)) == "no schedule is possible: is too long"


def test_amounts_are_numbers_or_bytes_that_know_their_unit() -> None:
    """One reader for limits of ``mpipe plan`` and of a training, and for sizes of buffers."""
    assert [read_amount(text) for text in ("0.5", ".5", "1e-1", "inf")] == [0.5, 0.5, 0.1, float("inf")]
    assert not isinstance(read_amount("3"), Bytes)
    amount = read_amount("1.5GiB")
    assert isinstance(amount, Bytes) and amount == 1.5 * 2**30 and amount.unit.amount(amount) == "1.5GiB"
    for text in ("12TiB", "12 GiB", "-1", "nan", "1e400", "much", ""):
        with pytest.raises(ValueError, match=r"could not convert|expected a number"):
            read_amount(text)
