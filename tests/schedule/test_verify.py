"""Every rule has a schedule that breaks it, and the error names rank and pass."""

import re

import pytest
from hypothesis import given
from schedule_strategies import parse, schedules

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.placement import linear, v
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.rules.verify import ScheduleError, verify


@given(schedules())
def test_schedules_that_obey_the_rules_pass(schedule: Schedule) -> None:
    verify(schedule)
    verify(schedule.forward_only(), forward_only=True)


@pytest.mark.parametrize(
    ("rule", "rows", "message"),
    [
        ("rows", ("F0 BW0",), "passes of 1 ranks for a placement of 2"),
        ("known microbatch", ("F0 F1 F2 BW0 BW1", "F0 BW0 F1 BW1"), "rank 0: F2.0 is of an unknown microbatch; they are 0..1"),
        ("known chunk", ("F0 BW0 F1 BW1", "F0 BW0 F0.1 F1 BW1"), "rank 1: F0.1 is of an unknown chunk; they are 0..0"),
        ("once", ("F0 F0 BW0 F1 BW1", "F0 BW0 F1 BW1"), "rank 0: F0.0 runs twice"),
        ("once, fused or split", ("F0 BW0 F1 BW1", "F0 B0 BW0 F1 BW1"), "rank 1: B0.0 runs again what BW0.0 does"),
        ("every F", ("F0 BW0 BW1", "F0 BW0 F1 BW1"), "rank 0: F1.0 is missing"),
        ("every B", ("F0 BW0 F1 BW1", "F0 BW0 F1"), "rank 1: B1.0 is missing"),
        ("every W", ("F0 BW0 F1 BW1", "F0 B0 F1 BW1"), "rank 1: W0.0 is missing"),
        ("F before B", ("F0 BW0 F1 BW1", "BW0 F0 F1 BW1"), "rank 1: BW0.0 runs before F0.0"),
        ("B before W", ("F0 W0 B0 F1 BW1", "F0 BW0 F1 BW1"), "rank 0: W0.0 runs before B0.0"),
        ("W in order", ("F0 F1 B0 B1 W1 W0", "F0 BW0 F1 BW1"), "rank 0: W0.0 runs after W1.0; W and BW"),
        ("W and BW in order", ("F0 F1 B0 BW1 W0", "F0 BW0 F1 BW1"), "rank 0: W0.0 runs after BW1.0; W and BW"),
        ("F in order", ("F1 F0 B0 W0 B1 W1", "F0 BW0 F1 BW1"), "rank 0: F0.0 runs after F1.0; F of one chunk"),
        ("B in order", ("F0 F1 B1 B0 W0 W1", "F0 BW0 F1 BW1"), "rank 0: B0.0 runs after B1.0; B and BW"),
        ("acyclic", ("F0 BW0 F1 BW1", "F0 F1 BW0 BW1"), "is stuck at (F1.0|BW0.0)"),
    ],
)
def test_a_broken_rule_is_named(rule: str, rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(Schedule(rule, linear(2), 2, parse(*rows)))


def test_the_order_of_gradients_is_kept_within_a_chunk_only() -> None:
    rows = "F0.0 F0.1 F1.0 F1.1 B0.1 B1.1 B0.0 B1.0 W0.1 W1.1 W0.0 W1.0"
    verify(Schedule("two chunks", v(1), 2, parse(rows)))


def test_memory_limit_names_the_first_pass_above_it_and_the_need() -> None:
    schedule = planning.plan("1f1b", 3, 8)
    verify(schedule, memory_limit=3)
    verify(schedule, memory_limit=[3, 2, 1])
    with pytest.raises(
        ScheduleError, match=re.escape("rank 0: F2.0 brings the activation memory of 1f1b to 3, above the limit of 2")
    ):
        verify(schedule, memory_limit=2)
    with pytest.raises(ScheduleError, match=r"rank 1: F1\.0 .* to 20, above the limit of 15; this schedule needs 20 there"):
        verify(schedule, uniform(schedule.placement, activation=10, retained=10), memory_limit=[30, 15, 30])


def test_a_limit_of_fractions_is_not_broken_by_rounding() -> None:
    schedule = Schedule("tenths", linear(1), 3, parse("F0 F1 F2 BW0 BW1 BW2"))
    assert 0.1 + 0.1 + 0.1 > 0.3
    verify(schedule, uniform(schedule.placement, activation=0.1, retained=0.1), memory_limit=0.3)


@pytest.mark.parametrize("limit", [-1, float("nan"), [1], [1, -1]])
def test_a_limit_that_is_none_is_refused(limit: float | list[float]) -> None:
    with pytest.raises(ValueError, match="a memory limit must be"):
        verify(planning.plan("1f1b", 2, 2), memory_limit=limit)


def test_forward_only_takes_forwards_and_nothing_else() -> None:
    schedule = planning.plan("zb-h1", 2, 2)
    with pytest.raises(ScheduleError, match=r"rank 0: B0\.0 is missing"):
        verify(schedule.forward_only())
    with pytest.raises(ScheduleError, match=r"rank 0: B0\.0 does not belong to a schedule of forwards only"):
        verify(schedule, forward_only=True)
    with pytest.raises(ScheduleError, match=r"rank 1: F0\.0 is missing"):
        verify(Schedule("half", linear(2), 1, parse("F0", "")), forward_only=True)


def test_a_file_may_claim_more_microbatches_than_fit_into_memory() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0: F1\.0 is missing"):
        verify(Schedule("huge", linear(1), 10**15, parse("F0 BW0")))
