"""Messages that start in batches: the proof accepts what the runtime does, and rejects a runtime that forgets to start them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import EQUAL_SHARDS, uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement, linear
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import (
    Compute,
    Flow,
    Message,
    Operation,
    Posting,
    Program,
    Receive,
    Send,
    Validate,
    Wait,
    starts_posted,
)
from megatron.pipeline.planner.schedule.lower.traffic import Traffic, with_waits_of_batches
from megatron.pipeline.planner.schedule.rules.deadlock import nothing_deadlocks
from megatron.pipeline.planner.schedule.rules.transports import TRANSPORTS
from megatron.pipeline.planner.schedule.rules.verify import ScheduleError, verify_programs


def batches_do_not_deadlock(
    programs: Sequence[Program], placement: Placement, starts: Callable[[Operation], bool] = starts_posted
) -> None:
    traffic = Traffic("by hand", placement, 1, tuple(programs))
    nothing_deadlocks(with_waits_of_batches(traffic), replace(TRANSPORTS["batched-direction"], starts=starts))


def programs_of(name: str, ranks: int, microbatches: int, vocabulary: Vocabulary | None, evaluates: bool) -> tuple[Program, ...]:
    costs = uniform(families.placement(name, ranks), hop=0.05)
    if vocabulary:
        costs = replace(costs, vocabulary=EQUAL_SHARDS)
    schedule = planning.plan(name, ranks, microbatches, costs, vocabulary=vocabulary)
    schedule = schedule.forward_only() if evaluates else schedule
    programs = lower(schedule, costs)
    verify_programs(schedule, programs, Posting.BATCHED)
    return programs


def starts_before_passes_and_messages(operation: Operation) -> bool:
    """A runtime that forgets that others may need messages before they join a collective."""
    return isinstance(operation, (Compute, Validate)) or (isinstance(operation, Wait) and isinstance(operation[0], Message))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "evaluates"),
    [("1f1b", 2, 1, False), ("zb-v", 4, 5, False), ("v-half", 4, 12, False), ("v-half", 4, 12, True), ("zb-h2", 8, 3, False)],
)
def test_messages_that_start_at_the_next_pass_only_are_a_deadlock(
    name: str, ranks: int, microbatches: int, evaluates: bool
) -> None:
    programs = programs_of(name, ranks, microbatches, Vocabulary.ONE_BARRIER, evaluates)
    with pytest.raises(ScheduleError, match=r"^deadlock over batched-direction .*: .*rank \d in Wait for the .* among all ranks"):
        batches_do_not_deadlock(programs, families.placement(name, ranks), starts_before_passes_and_messages)


def test_the_message_has_the_circle() -> None:
    programs = programs_of("1f1b", 2, 1, Vocabulary.ONE_BARRIER, False)
    with pytest.raises(ScheduleError) as error:
        batches_do_not_deadlock(programs, linear(2), starts_before_passes_and_messages)
    assert str(error.value) == (
        "deadlock over batched-direction (groups on one communicator for each direction): rank 0 in Wait for the output of "
        "microbatch 0 among all ranks; rank 1 in Wait for the activation of microbatch 0 from stage 0; rank 1 in Receive of the "
        "activation of microbatch 0 from stage 0 from rank 0"
    )


FIRST, SECOND, BACK = (Message(Flow.ACTIVATION, 0, 0), Message(Flow.ACTIVATION, 1, 0), Message(Flow.GRADIENT, 0, 1))
ROUND_TRIP = (
    (Send(FIRST, 1), Receive(BACK, 1), Wait(BACK), Send(SECOND, 1)),
    (Receive(FIRST, 0), Receive(SECOND, 0), Wait(FIRST), Send(BACK, 0), Wait(SECOND)),
)


def test_a_batch_ends_as_a_whole() -> None:
    """Rank 1 waits for the first message together with the second, which rank 0 sends once it has an answer."""
    circle = r"rank 0 in Wait .*gradient.*; rank 1 in Wait .*microbatch 0.*; rank 1 in Receive .*microbatch 1.* from rank 0"
    with pytest.raises(ScheduleError, match=circle):
        batches_do_not_deadlock(ROUND_TRIP, linear(2))
    apart = ROUND_TRIP[0], (ROUND_TRIP[1][0], Compute(Pass(Kind.W, 0)), *ROUND_TRIP[1][1:])
    batches_do_not_deadlock(apart, linear(2))


def test_batches_of_one_direction_follow_each_other() -> None:
    """Rank 1 has begun to receive from rank 0, and cannot send on before that is over."""
    other = Message(Flow.ACTIVATION, 0, 1)
    waits = (Receive(other, 1), Wait(other))
    sends = (Receive(FIRST, 0), Compute(Pass(Kind.W, 0)), Send(other, 2))
    asks = (Receive(Message(Flow.GRADIENT, 0, 2), 2), Wait(Message(Flow.GRADIENT, 0, 2)), Send(FIRST, 1))
    answers = (*waits, Send(Message(Flow.GRADIENT, 0, 2), 0))
    with pytest.raises(ScheduleError, match=r"rank 0 in Wait .*; rank 2 in Wait .*; rank 1 in Receive .* from rank 0"):
        batches_do_not_deadlock((asks, sends, answers), linear(3))
    batches_do_not_deadlock((asks, sends[2:] + sends[1:2] + sends[:1], answers), linear(3))
