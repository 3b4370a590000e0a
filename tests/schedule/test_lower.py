"""Lowering, and the rules for programs."""

from collections.abc import Callable

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import costs_of, moved, schedules, without

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import (
    Compute,
    Flow,
    Message,
    Posting,
    Program,
    Receive,
    Send,
    Validate,
    Wait,
)
from megatron.pipeline.planner.schedule.lower.traffic import of_programs
from megatron.pipeline.planner.schedule.rules.deadlock import nothing_deadlocks
from megatron.pipeline.planner.schedule.rules.transports import TRANSPORTS
from megatron.pipeline.planner.schedule.rules.verify import ScheduleError, verify_programs
from megatron.pipeline.planner.schedule.time.simulate import simulate


@examples(200)
@given(st.data())
def test_every_schedule_lowers_to_programs_that_obey_the_rules(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule.placement))
    for each in (schedule, schedule.forward_only()):
        programs = lower(each, costs)
        verify_programs(each, programs, Posting.BATCHED)
        _check_places(each, programs, simulate(each, costs).ranks)


def _check_places(schedule: Schedule, programs: tuple[Program, ...], timed: tuple[tuple[Timed, ...], ...]) -> None:
    ends = {(rank, work): end for rank, row in enumerate(timed) for work, _, end in row}
    backward = min((start for row in timed for work, start, _ in row if work.kind is not Kind.F), default=None)
    for rank, program in enumerate(programs):
        if backward is not None:
            cut = program.index(Validate())
            early = [op.work for op in program[:cut] if isinstance(op, Compute)]
            begun = [work for work, start, _ in timed[rank] if start < backward]
            assert early[: len(begun)] == begun, "what starts before the first backward comes before the validation"
        without = tuple(operation for operation in program if not isinstance(operation, Validate))
        for slot, operation in enumerate(without):
            # The pass that runs at that moment comes before the validation, whatever is sent meanwhile after it.
            straddles = backward is not None and slot >= cut
            if isinstance(operation, Send):
                before = next(op for op in reversed(without[:slot]) if isinstance(op, Compute) or not straddles)
                assert isinstance(before, Compute), "a send directly follows the pass that makes its tensor"
            if isinstance(operation, Wait):
                assert isinstance(without[slot + 1], Compute), "a wait directly precedes the pass that needs its tensor"
            if isinstance(operation, Receive):
                message = operation.message
                home, chunk = schedule.placement.home(message.stage)
                kinds = (Kind.F,) if message.flow is Flow.ACTIVATION else (Kind.BW, Kind.B)
                kind = schedule.rows[home].first_of(kinds, message.microbatch, chunk).kind
                sent = ends[home, Pass(kind, message.microbatch, chunk)]
                following = next(op.work for op in without[slot:] if isinstance(op, Compute))
                assert ends[rank, following] >= sent, "a receive is not posted before a pass that is over when it is sent"
                earlier = [op.work for op in without[:slot] if isinstance(op, Compute)]
                if straddles:
                    earlier = [work for work in earlier if work not in begun]
                assert all(ends[rank, work] <= sent for work in earlier), "a receive precedes the pass that runs when it is sent"


def test_by_hand_a_receive_overlaps_the_pass_that_runs_when_its_tensor_is_sent() -> None:
    schedule = planning.plan("1f1b", 2, 2)
    first, second = lower(schedule, uniform(schedule.placement, hop=0.5))

    def activation(microbatch: int) -> Message:
        return Message(Flow.ACTIVATION, microbatch, 0)

    assert second[:7] == (
        Receive(activation(0), 0),
        Receive(activation(1), 0),  # sent at 2, while F0 runs from 1.5 to 2.5
        Wait(activation(0)),
        Compute(Pass(Kind.F, 0)),
        Validate(),
        Compute(Pass(Kind.BW, 0)),
        Send(Message(Flow.GRADIENT, 0, 1), 0),
    )
    assert first[:4] == (Compute(Pass(Kind.F, 0)), Send(activation(0), 1), Compute(Pass(Kind.F, 1)), Send(activation(1), 1))
    assert first[4] == Validate(), "rank 1 starts its first backward at 2.5"


def test_a_pipeline_of_one_rank_sends_nothing() -> None:
    (program,) = lower(planning.plan("zb-h1", 1, 3), uniform(families.placement("zb-h1", 1)))
    assert all(isinstance(operation, (Compute, Validate)) for operation in program)


SCHEDULE = planning.plan("1f1b", 2, 2)
PROGRAMS = lower(SCHEDULE, uniform(SCHEDULE.placement))
ACTIVATION = Message(Flow.ACTIVATION, 0, 0)
GRADIENT = Message(Flow.GRADIENT, 0, 1)


@pytest.mark.parametrize(
    ("rule", "rank", "change", "message"),
    [
        (
            "passes",
            0,
            lambda p: without(p, Compute(Pass(Kind.F, 1))),
            "rank 0: pass 1 of the program is BW0.0, of the schedule F1.0",
        ),
        (
            "sent",
            0,
            lambda p: without(p, Send(ACTIVATION, 1)),
            "rank 0: Send of the activation of microbatch 0 .* is missing; F0.0",
        ),
        ("sent once", 0, lambda p: (*p, Send(ACTIVATION, 1)), "rank 0: Send of the activation of microbatch 0 .* twice"),
        ("sent late", 0, lambda p: moved(p, Send(ACTIVATION, 1), p[0]), "rank 0: Send of the activation .* comes before F0.0"),
        ("received", 1, lambda p: without(p, Receive(ACTIVATION, 0)), "rank 1: Receive of the activation .* is missing; F0.0"),
        ("right peer", 1, lambda p: (Receive(ACTIVATION, 1), *without(p, Receive(ACTIVATION, 0))), "Receive .* with peer 1"),
        ("waited for", 1, lambda p: without(p, Wait(ACTIVATION)), "rank 1: Wait of the activation .* is missing; F0.0"),
        (
            "wait after receive",
            1,
            lambda p: moved(p, Wait(ACTIVATION), p[0]),
            "rank 1: F0.0 needs the activation of microbatch 0",
        ),
        ("wait before use", 0, lambda p: (*without(p, Wait(GRADIENT)), Wait(GRADIENT)), "rank 0: BW0.0 needs the gradient"),
        ("validates", 0, lambda p: without(p, Validate()), "rank 0: Validate comes 0 times instead of 1"),
        ("validates once", 1, lambda p: (*p, Validate()), "rank 1: Validate comes 2 times instead of 1"),
        ("forwards alone are void", 1, lambda p: (*without(p, Validate()), Validate()), "rank 1: BW0.0 comes before Validate"),
        ("void on both sides", 0, lambda p: moved(p, Validate(), p[0]), "activation .* crosses the validation between ranks"),
        ("needed", 1, lambda p: (*p, Send(Message(Flow.GRADIENT, 0, 0), 0)), "rank 1: Send .* which no other rank needs"),
    ],
)
def test_a_broken_program_is_named(rule: str, rank: int, change: Callable[[Program], Program], message: str) -> None:
    programs = [change(program) if index == rank else program for index, program in enumerate(PROGRAMS)]
    with pytest.raises(ScheduleError, match=message):
        verify_programs(SCHEDULE, programs)


def test_both_ends_use_the_same_order() -> None:
    first, second = lower(SCHEDULE, uniform(SCHEDULE.placement, hop=0.5))
    second = (second[1], second[0], *second[2:])
    with pytest.raises(
        ScheduleError, match=r"rank 1 receives the activation of microbatch 1 .* where rank 0 sends .* microbatch 0"
    ):
        verify_programs(SCHEDULE, [first, second])


def test_a_deadlock_names_what_every_rank_is_stuck_in() -> None:
    first, second = PROGRAMS
    # Rank 0 asks for the gradient before it sends the first activation.
    first = moved(first, Receive(GRADIENT, 1), first[0])
    with pytest.raises(
        ScheduleError,
        match=r"deadlock .*rank 0 in Receive of the gradient of microbatch 0 .*; rank 1 in Receive of the activation",
    ):
        verify_programs(SCHEDULE, [first, second])


def test_two_sends_that_face_each_other_do_not_match() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 in Send of the activation .* to rank 1, which that rank never receives"):
        nothing_deadlocks(of_programs(SCHEDULE, [(Send(ACTIVATION, 1),), (Send(ACTIVATION, 0),)]), TRANSPORTS["rendezvous"])


def test_one_program_per_rank() -> None:
    with pytest.raises(ScheduleError, match="1 programs for 2 ranks"):
        verify_programs(SCHEDULE, PROGRAMS[:1])
