"""The rules of passes and programs that copy activations to host memory and back: which breach is named how."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from schedule_strategies import moved, one_rank, parse, without

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Compute, Copy, Program, Wait
from megatron.pipeline.planner.schedule.rules.verify import ScheduleError, verify, verify_programs


def offloaded() -> tuple[Schedule, Costs]:
    return one_rank("F0 F1 D2H0 F2 D2H1 H2D0 BW0 H2D1 BW1 BW2")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("F0 D2H1 F1 H2D1 BW0 BW1", "rank 0: D2H1.0 runs before F1.0; it must run after it"),
        ("F0 F1 H2D1 D2H1 BW0 BW1", "rank 0: H2D1.0 runs before D2H1.0; it must run after it"),
        ("F0 F1 D2H1 BW0 BW1 H2D1", "rank 0: BW1.0 runs before H2D1.0; it must run after it"),
        ("F0 F1 D2H1 B0 W0 B1 H2D1 W1", "rank 0: B1.0 runs before H2D1.0; it must run after it"),
        ("F0 F1 D2H1 BW0 R1 H2D1 BW1", "rank 0: R1.0 runs before H2D1.0; it must run after it"),
        ("F0 F1 D2H1 BW0 BW1", "rank 0: H2D1.0 is missing; add it"),
        ("F0 F1 BW0 H2D1 BW1", "rank 0: D2H1.0 is missing; add it"),
        ("F0 F1 D2H1 D2H1 H2D1 BW0 BW1", "rank 0: D2H1.0 runs twice; remove one"),
        ("F0 F1 D2H1 H2D1 H2D1 BW0 BW1", "rank 0: H2D1.0 runs twice; remove one"),
        ("F0 F1 D2H7.0 H2D7.0 BW0 BW1", "rank 0: D2H7.0 is of an unknown microbatch; they are 0..1"),
        ("F0 F1 D2H1.1 H2D1.1 BW0 BW1", "rank 0: D2H1.1 is of an unknown chunk; they are 0..0"),
    ],
)
def test_a_broken_rule_is_named(row: str, message: str) -> None:
    with pytest.raises(ScheduleError) as broken:
        verify(Schedule("own", linear(1), 2, parse(row)))
    assert str(broken.value) == message


def test_copies_have_no_place_in_an_evaluation() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0: D2H0.0 does not belong to a schedule of forwards only; remove it"):
        verify(Schedule("own", linear(1), 2, parse("F0 F1 D2H0 H2D0")), forward_only=True)


def test_a_copy_back_allocates_at_its_place() -> None:
    schedule, costs = one_rank("F0 D2H0 F1 H2D0 BW0 BW1")
    verify(schedule, costs, 2)
    with pytest.raises(ScheduleError, match=r"rank 0: H2D0.0 brings the activation memory of own to 2, above the limit of 1.5"):
        verify(schedule, costs, 1.5)


AWAY, BACK = Pass(Kind.D2H, 0), Pass(Kind.H2D, 0)


TO_HOST = "D2H0.0 needs, in this order: Compute F0.0, Copy D2H0.0, Wait D2H0.0"
TO_DEVICE = "H2D0.0 needs, in this order: Wait D2H0.0, Copy H2D0.0, Wait H2D0.0, Compute BW0.0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: moved(p, Wait(AWAY), Compute(Pass(Kind.F, 1))), "pass 1 of the program is D2H0.0, of the schedule F1.0"),
        (lambda p: moved(p, Copy(BACK), Compute(Pass(Kind.F, 2))), "pass 3 of the program is H2D0.0, of the schedule F2.0"),
        (lambda p: without(p, Wait(AWAY)), "pass 2 of the program is F2.0, of the schedule D2H0.0"),
        (lambda p: without(p, Copy(BACK)), "of the schedule H2D0.0"),
        (lambda p: moved(p, Copy(AWAY), Compute(Pass(Kind.F, 0))), TO_HOST),
        (lambda p: moved(p, Copy(AWAY), Compute(Pass(Kind.F, 2))), TO_HOST),
        (lambda p: without(p, Copy(AWAY)), TO_HOST),
        (lambda p: moved(p, Wait(BACK), Copy(BACK)), TO_DEVICE),
        (lambda p: moved(p, Wait(BACK), Compute(Pass(Kind.BW, 2))), TO_DEVICE),
        (lambda p: without(p, Wait(BACK)), TO_DEVICE),
        (lambda p: (*p, Copy(AWAY)), "rank 0: Copy D2H0.0 comes twice; remove one"),
        (lambda p: (*p, Wait(BACK)), "rank 0: Wait H2D0.0 comes twice; remove one"),
        (lambda p: (*p, Copy(Pass(Kind.D2H, 2))), "rank 0: Copy D2H2.0, which the schedule does not have; remove it"),
        (lambda p: (*p, Wait(Pass(Kind.H2D, 2))), "rank 0: Wait H2D2.0, which the schedule does not have; remove it"),
    ],
)
def test_a_broken_rule_of_programs_is_named(change: Callable[[Program], Program], message: str) -> None:
    schedule, costs = offloaded()
    (program,) = lower(schedule, costs)
    verify_programs(schedule, (program,))
    with pytest.raises(ScheduleError) as broken:
        verify_programs(schedule, (change(program),))
    assert message in str(broken.value)


def test_copies_to_the_host_start_in_the_order_of_their_forwards() -> None:
    schedule, costs = one_rank("F0 F1 F2 D2H0 D2H1 H2D0 BW0 H2D1 BW1 BW2")
    (program,) = lower(schedule, costs)
    late = moved(program, Copy(AWAY), Wait(AWAY))
    with pytest.raises(ScheduleError) as broken:
        verify_programs(schedule, (late,))
    assert "rank 0: Copy D2H1.0 starts where its lane has D2H0.0; they start in the order of F" in str(broken.value)
