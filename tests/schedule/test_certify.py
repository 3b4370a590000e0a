"""What hangs over which transport, where, and what lines cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import costs_of, schedules

from megatron.pipeline.planner.schedule.certify.certificate import Certificate, TransportOutcome, certify
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.kinds import Flow
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Compute, Message, Program, Receive, Send, Wait
from megatron.pipeline.planner.schedule.lower.traffic import Start, Step, Traffic, of_programs, with_waits_of_batches
from megatron.pipeline.planner.schedule.rules.deadlock import Blocked, End, TrafficNetwork, nothing_deadlocks
from megatron.pipeline.planner.schedule.rules.transports import TRANSPORTS, TransportModel
from megatron.pipeline.planner.schedule.time.simulate import simulate

IN_ORDER = ("rendezvous", "shared", "pair", "direction", "queue")


def message(number: int, stage: int = 0, flow: Flow = Flow.ACTIVATION) -> Message:
    return Message(flow, number, stage)


def forward(number: int = 0) -> Compute:
    return Compute(Pass(Kind.F, number))


def traffic(*rows: list[Step], batches: bool = True) -> Traffic:
    made = [tuple(row) if batches else tuple(chain(*((step, Start()) for step in row))) for row in rows]
    return Traffic("by hand", linear(len(rows)), 4, tuple(made))


def posts_of(traffic: Traffic) -> dict[End, Send | Receive]:
    steps = ((rank, place, step) for rank, row in enumerate(traffic.rows) for place, step in enumerate(row))
    return {(rank, place, False): step for rank, place, step in steps if isinstance(step, Send | Receive)}


def partners(posts: dict[End, Send | Receive]) -> dict[End, End]:
    """For every post its other end: the n-th send from a rank to another meets the n-th receive there."""

    def ends(kind: type, rank: int, peer: int) -> list[End]:
        return [end for end, post in posts.items() if end[0] == rank and post.peer == peer and isinstance(post, kind)]

    ways = {(end[0], post.peer) for end, post in posts.items()}
    found = [pair for a, b in ways for pair in zip(ends(Send, a, b), ends(Receive, b, a), strict=False)]
    return dict(found) | {other: one for one, other in found}


def is_stuck(programs: Sequence[Program]) -> bool:
    """Whether programs without collectives are, where every Send and Receive blocks until its peer reaches the other: run as
    they are, one rank after another."""
    left = [[step for step in reversed(program) if isinstance(step, Send | Receive)] for program in programs]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(left):
            while mine and (theirs := left[mine[-1].peer]):
                one, other = mine[-1], theirs[-1]
                if type(one) is type(other) or one.message != other.message or other.peer != rank:
                    break
                moved = bool(mine.pop() and theirs.pop())
    return any(left)


def outcomes(one: Traffic, hop: float = 0.0, cold: bool = False) -> dict[str, TransportOutcome]:
    certificate = certify(one, uniform(one.placement, hop=hop), cold=cold)
    return {outcome.transport.name: outcome for outcome in certificate.outcomes}


def hanging(one: Traffic, cold: bool = False) -> set[str]:
    return {name for name, outcome in outcomes(one, cold=cold).items() if outcome.hang}


UP, DOWN = message(0, 0), message(0, 1, Flow.GRADIENT)


def test_two_ranks_that_both_send_first_hang_where_one_line_has_both_directions() -> None:
    head_on = traffic([forward(), Send(UP, 1), Receive(DOWN, 1)], [forward(), Send(DOWN, 0), Receive(UP, 0)], batches=False)
    assert hanging(head_on) == {"rendezvous", "shared", "pair", "batched", "queue"}
    in_groups = traffic([forward(), Send(UP, 1), Receive(DOWN, 1)], [forward(), Send(DOWN, 0), Receive(UP, 0)])
    assert hanging(in_groups) == {"rendezvous", "shared", "pair", "queue"}
    chain = outcomes(head_on)["pair"].hang
    assert chain is not None
    assert [str(blocked) for blocked in chain.chain] == [
        "rank 0, after F0.0: Send of the activation of microbatch 0 from stage 0 to rank 1",
        "rank 1, after F0.0: Send of the gradient of microbatch 0 from stage 1 to rank 0",
    ]


def test_a_message_that_only_one_rank_has_is_named() -> None:
    lonely = traffic([forward(), Send(UP, 1)], [forward(1)])
    assert hanging(lonely) == set(TRANSPORTS)
    for outcome in outcomes(lonely).values():
        assert outcome.hang is not None
        assert outcome.hang.missing
        assert [blocked.what for blocked in outcome.hang.chain] == [
            "Send of the activation of microbatch 0 from stage 0 to rank 1, which that rank never receives"
        ]
    unsent = traffic([forward()], [Receive(UP, 0), Wait(UP), forward(1)])
    assert hanging(unsent) == set(TRANSPORTS)
    assert certify(unsent, uniform(linear(2))).unlimited is None
    hang = outcomes(unsent)["pair"].hang
    assert hang is not None
    assert [str(blocked) for blocked in hang.chain] == [
        "rank 1, before F1.0: Wait for the activation of microbatch 0 from stage 0",
        "rank 1, before F1.0: Receive of the activation of microbatch 0 from stage 0 from rank 0, which that rank never sends",
    ]


def test_messages_in_different_orders_are_swapped() -> None:
    one, two = message(0), message(1)
    crossed = certify(traffic([Send(one, 1), Send(two, 1)], [Receive(two, 0), Receive(one, 0)]), uniform(linear(2)))
    assert crossed.hangs
    assert not any(outcome.hang for outcome in crossed.outcomes)
    assert crossed.swapped == (
        "rank 1 receives the activation of microbatch 1 from stage 0 "
        "where rank 0 sends the activation of microbatch 0 from stage 0",
    )


def test_a_receive_holds_up_the_send_behind_it_on_the_same_communicator_alone() -> None:
    """Rank 0 waits in line for rank 2, which computes for 3 seconds, before it can send to rank 1."""
    back = message(0, 2, Flow.GRADIENT)
    line = traffic(
        [Receive(back, 2), Send(UP, 1), forward(), Wait(back), forward(1)],
        [Receive(UP, 0), Wait(UP), forward()],
        [forward(), forward(1), forward(2), Send(back, 0)],
    )
    found = outcomes(line, hop=0.5)
    assert certify(line, uniform(linear(3), hop=0.5)).unlimited == 4.5
    assert {name: outcome.makespan for name, outcome in found.items()} == {
        "rendezvous": 6.0,  # 3 s, a hop for each message, and two passes
        "shared": 5.0,  # the send starts at 3.5; a hop and a pass later rank 1 ends
        "pair": 4.5,
        "direction": 4.5,
        "batched": 4.5,
        "batched-direction": 4.5,
        "queue": 6.0,  # and rank 0 computes once that is out
    }


def test_a_group_ends_as_a_whole() -> None:
    """Rank 1 has its tensor after a hop, and waits for the group that receives from rank 2 as well."""
    late_one = message(0, 2, Flow.GRADIENT)
    group = traffic(
        [Send(UP, 1)], [Receive(UP, 0), Receive(late_one, 2), Wait(UP), forward()], [forward(), forward(1), Send(late_one, 1)]
    )
    found = outcomes(group, hop=1.0)
    assert found["pair"].makespan == 2
    assert found["batched"].makespan == 2 + 1 + 1
    assert found["batched-direction"].makespan == 2  # they come from both directions


def test_a_cold_start_connects_hosts_in_the_order_of_their_posts() -> None:
    """Three hosts that each connect to the next rank first wait in a circle; their devices would not."""
    one, two, three = (message(0, stage) for stage in range(3))
    ring = traffic(
        [Send(one, 1), Receive(three, 2)], [Send(two, 2), Receive(one, 0)], [Send(three, 0), Receive(two, 1)], batches=False
    )
    assert hanging(ring, cold=True) >= {"direction"}
    assert "direction" not in hanging(ring)
    hang = outcomes(ring, cold=True)["direction"].hang
    assert hang is not None
    assert all(blocked.what.startswith("connecting for the Send") for blocked in hang.chain)
    assert [blocked.rank for blocked in hang.chain] in ([0, 1, 2], [1, 2, 0], [2, 0, 1])


def check_circle(certificate: Certificate, outcome: TransportOutcome) -> None:
    """Each of a hang really waits for the next: the rules of ``transports.py``, from the order of the rows alone."""
    assert outcome.hang is not None
    traffic, transport, hang = certificate.traffic, outcome.transport, outcome.hang
    posts = posts_of(traffic)
    other, by_item = partners(posts), {(end[0], post.message): end for end, post in posts.items()}
    assert hang.chain
    pairs = list(pairwise(hang.chain))
    if not hang.missing:
        pairs.append((hang.chain[-1], hang.chain[0]))
    for one, following in pairs:
        step = traffic.rows[one.rank][one.place]
        if isinstance(step, Wait):
            assert isinstance(step.message, Message)
            end = by_item[one.rank, step.message]
            assert following.rank == one.rank
            assert following.end is not None
            assert is_in_line(traffic, transport, posts, following, end, before_only=False)
            continue
        assert one.end is not None
        end = other[one.end]
        assert following.rank == end[0]
        if following.row == "line":
            assert is_in_line(traffic, transport, posts, following, end, before_only=True)
        elif following.end is not None:
            assert transport.line is None
            assert following.end < end
        else:
            assert following.place < end[1]  # what blocks the row stands before the post


def is_in_line(
    traffic: Traffic, transport: TransportModel, posts: dict[End, Send | Receive], blocked: Blocked, end: End, before_only: bool
) -> bool:
    assert transport.line is not None
    assert blocked.end is not None

    def communicator(at: End) -> object:
        ways = (at[0], posts[at].peer) if isinstance(posts[at], Send) else (posts[at].peer, at[0])
        return transport.line(*ways) if transport.line else None

    low, high = sorted((blocked.place, end[1]))
    is_group = transport.grouped and all(isinstance(step, Send | Receive) for step in traffic.rows[end[0]][low : high + 1])
    order = blocked.end < end if before_only else blocked.end <= end or is_group
    return communicator(blocked.end) == communicator(end) and order


@examples(150)
@given(st.data())
def test_what_is_lowered_here_hangs_over_no_transport_that_runs_posts_in_order(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule.placement))
    programs = lower(schedule, costs)
    certificate = certify(of_programs(schedule, programs), costs)
    assert certificate.swapped == ()
    assert certificate.unlimited is not None
    ends = max((timed.end for row in simulate(schedule, costs).ranks for timed in row), default=0)
    assert certificate.unlimited == pytest.approx(float(ends))
    for outcome in certificate.outcomes:
        if outcome.transport.name in IN_ORDER:
            assert outcome.hang is None, outcome.transport.name
        if outcome.makespan is None:
            check_circle(certificate, outcome)
        else:
            assert outcome.makespan >= certificate.unlimited - 1e-9
    # The proof for batches asks for more than the transport does.
    try:
        nothing_deadlocks(with_waits_of_batches(certificate.traffic), TRANSPORTS["batched-direction"])
    except ScheduleError:
        return
    assert next(each for each in certificate.outcomes if each.transport.name == "batched-direction").hang is None


@examples(150)
@given(schedules(), st.integers(0, 2**32))
def test_swapped_operations_hang_where_the_rules_say_so_and_the_circle_is_true(schedule: Schedule, seed: int) -> None:
    generator, costs = random.Random(seed), uniform(schedule.placement)
    programs = [list(program) for program in lower(schedule, costs)]
    program = generator.choice(programs)
    places = [place for place, operation in enumerate(program) if isinstance(operation, Send | Receive)]
    for first, second in pairwise(places):
        # A rank cannot wait for what it posts later.
        moved, waited = program[first], {each.message for each in program[first:second] if isinstance(each, Wait)}
        if generator.random() < 0.3 and isinstance(moved, Send | Receive) and moved.message not in waited:
            program[first], program[second] = program[second], program[first]
    changed: tuple[Program, ...] = tuple(map(tuple, programs))
    certificate = certify(of_programs(schedule, changed), costs)
    if certificate.swapped:  # the rules compare messages by name, and NCCL does not
        return
    assert (certificate.outcomes[0].hang is not None) == is_stuck(changed)
    for outcome in certificate.outcomes:
        if outcome.hang:
            check_circle(certificate, outcome)


def test_costs_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="costs of 3 stages"):
        certify(traffic([forward()], [forward()]), Costs((StageCosts(1.0, 1.0, 1.0),) * 3))


def test_a_network_counts_only_passes() -> None:
    """Messages after the last pass take no part in the makespan."""
    one = traffic([forward(), Send(UP, 1)], [Receive(UP, 0)])
    network = TrafficNetwork(one, TRANSPORTS["pair"], replace(uniform(linear(2)), hop=9.0))
    assert network.stuck == []
    assert network.makespan == 1
