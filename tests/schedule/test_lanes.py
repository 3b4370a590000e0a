"""Copy lanes: when copies run beside the passes, what waits for them, and how they slow each other down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import parse

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Offload, Pass
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.time.clock import Clock
from megatron.pipeline.planner.schedule.time.lanes import switches
from megatron.pipeline.planner.schedule.time.links import PassLink, Rows
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.planner.schedule.transforms.offload import offload
from megatron.pipeline.planner.schedule.transforms.transform import without_copies

STEP = 1 / 128


def on_the_way(queues: Sequence[Sequence[tuple[float, float]]], costs: CopyCosts) -> list[list[tuple[float, float]]]:
    """(start, end) of copies given as (from when it may start, seconds alone), in two queues for every rank."""
    ranks, most = len(queues) // 2, max(map(len, queues))
    passes = [()] * ranks + [tuple(Pass(Kind.H2D, number) for number in range(len(queue))) for queue in queues]
    first = [most * (1 + lane) for lane in range(len(queues))]  # the numbers of what a lane's copies need
    made_at = [None] * most + [ready for queue in queues for ready, _ in [*queue, *[(0, 0)] * (most - len(queue))]]
    seconds = [[0.0]] * ranks + [[alone for _, alone in queue] for queue in queues]
    numbers = [*[0] * ranks, *first]
    links = [[{Kind.H2D: PassLink(0, number, [0.0] * most, row)}] for number, row in zip(numbers, seconds, strict=True)]
    clock = Clock(ranks, Rows(passes, passes, links, made_at, []), switches(ranks, costs))
    clock.follow(passes)
    return [
        list(zip(starts.values(), ends.values(), strict=True))
        for starts, ends in zip(clock.starts[ranks:], clock.ends[ranks:], strict=True)
    ]


def in_small_steps(queues: Sequence[Sequence[tuple[float, float]]], costs: CopyCosts) -> list[list[tuple[float, float]]]:
    """``on_the_way`` once more, by letting a little time pass again and again."""
    left = [[seconds for _, seconds in queue] for queue in queues]
    found: list[list[list[float]]] = [[] for _ in queues]
    now = 0.0
    while any(len(done) < len(queue) or rest[-1:] > [0] for done, queue, rest in zip(found, queues, left, strict=True)):
        moving = []
        for lane, queue in enumerate(queues):
            at = len(found[lane])
            if at and left[lane][at - 1] > 0:
                moving.append(lane)
            elif at < len(queue) and queue[at][0] <= now:
                found[lane].append([now, now])
                moving.append(lane)
        for lane in moving:
            group = [other for other in moving if other // (2 * costs.switch) == lane // (2 * costs.switch)]
            alike = sum(other % 2 == lane % 2 for other in group)
            through_the_switch = costs.shared * costs.switch / alike
            speed = min(1.0, through_the_switch) * (costs.both if lane ^ 1 in group else 1.0)
            at = len(found[lane]) - 1
            left[lane][at] -= speed * STEP
            found[lane][at][1] = now + STEP
        now += STEP
    return [[(start, end) for start, end in lane] for lane in found]


@examples(40)
@given(st.data())
def test_copies_share_what_there_is(data: st.DataObject) -> None:
    """Copies that overlap slow each other down as long as they do: against small steps of time."""
    switch = data.draw(st.integers(1, 3))
    both, shared = data.draw(st.sampled_from([0.5, 0.75, 1])), data.draw(st.sampled_from([1 / switch, (1 + 1 / switch) / 2, 1]))
    costs = CopyCosts(both=both, switch=switch, shared=shared)
    quarters = st.integers(0, 8).map(lambda number: number / 4)
    queue = st.lists(st.tuples(quarters, quarters.filter(bool)), max_size=3)
    queues = [sorted(data.draw(queue)) for _ in range(2 * data.draw(st.integers(1, 3)))]
    count = sum(map(len, queues))
    for found, wanted, asked in zip(on_the_way(queues, costs), in_small_steps(queues, costs), queues, strict=True):
        assert [end for _, end in found] == pytest.approx([end for _, end in wanted], abs=2 * count * STEP)
        assert [start for start, _ in found] == pytest.approx([start for start, _ in wanted], abs=2 * count * STEP)
        assert all(start >= ready for (start, _), (ready, _) in zip(found, asked, strict=True))
        for (start, end), (_, seconds) in zip(found, asked, strict=True):
            assert seconds * (1 - 1e-9) <= end - start <= seconds / costs.slowest * (1 + 1e-9)


ROW = "F0 F1 D2H0 F2 D2H1 H2D1 H2D0 BW0 BW1 BW2"
STAGE = StageCosts(1, 1, 1, activation=2)


def one_rank(row: str, to_host: float, to_device: float, microbatches: int = 3) -> tuple[Schedule, Costs]:
    return Schedule("own", linear(1), microbatches, parse(row)), Costs((STAGE,), copies=CopyCosts(to_host, to_device))


def test_when_copies_run() -> None:
    """To the host as soon as F has ended, in the order of F; to the device from their place on, in the order of the row."""
    timeline = simulate(*one_rank(ROW, 0.25, 0.5))
    assert {str(work): (start, end) for work, start, end in timeline.copies[0]} == {
        "D2H0.0": (1, 1.5), "D2H1.0": (2, 2.5), "H2D1.0": (3, 4), "H2D0.0": (4, 5),
    }  # fmt: skip
    assert {str(work): (start, end) for work, start, end in timeline.ranks[0]} == {
        "F0.0": (0, 1), "F1.0": (1, 2), "D2H0.0": (2, 2), "F2.0": (2, 3), "D2H1.0": (3, 3), "H2D1.0": (3, 3), "H2D0.0": (3, 3),
        "BW0.0": (5, 7), "BW1.0": (7, 9), "BW2.0": (9, 11),
    }  # fmt: skip


def test_a_slow_copy_keeps_its_row_waiting() -> None:
    """F2 comes after the place where the memory of microbatch 0 must be free."""
    timeline = simulate(*one_rank(ROW, 1.5, 0))
    started = {str(work): start for work, start, _ in timeline.ranks[0]}
    assert started["F2.0"] == started["D2H0.0"] == 4
    assert started["D2H1.0"] == started["BW0.0"] == 7
    assert timeline.span == 13


def test_copies_of_what_runs_again_are_of_its_checkpoint_and_r_waits() -> None:
    stage = replace(STAGE, recompute=1, checkpoint=0.5)
    schedule = Schedule("own", linear(1), 2, parse("F0 F1 D2H0 H2D0 R0 BW0 R1 BW1"))
    costs = Costs((stage,), copies=CopyCosts(1, 2))
    assert [end - start for _, start, end in simulate(schedule, costs).copies[0]] == [0.5, 1.0]
    assert schedule.rows[0].awaited == {Pass(Kind.R, 0): Pass(Kind.H2D, 0)}
    assert next(timed for timed in simulate(schedule, costs).ranks[0] if timed.work.kind is Kind.R).start == 3


def check(schedule: Schedule, costs: Costs, timeline: Timeline) -> None:
    """No copy before its F or its place, no pass before what it needs is back, and one copy at a time on a lane."""
    slack = 1e-6
    for own, row, copies in zip(schedule.rows, timeline.ranks, timeline.copies, strict=True):
        assert sorted(one.work for one in copies) == sorted(work for work in own.passes if work.kind.is_copy)
        at = {one.work: one for one in row}
        for copy in copies:
            work, place = copy.work, at[copy.work]
            if work.kind is Kind.D2H:
                assert at[work._replace(kind=Kind.F)].end <= copy.start + slack and copy.end <= place.start + slack
            else:
                assert place.start <= copy.start + slack
        back = {one.work: one.end for one in copies}
        assert all(back[copy] <= at[work].start + slack for work, copy in own.awaited.items())
        for kind in (Kind.D2H, Kind.H2D):
            lane = [one for one in copies if one.work.kind is kind]
            assert all(one.end <= after.start + slack for one, after in pairwise(lane))
        assert all(one.end <= after.start + slack for one, after in pairwise(row))


CONTENDED = CopyCosts(0.5, 0.75, both=0.75, switch=2, shared=0.6)


@pytest.mark.parametrize("copies", [CopyCosts(0.5, 0.75), CONTENDED])
@pytest.mark.parametrize("name", ["interleaved", "1f1b", "v-half"])
def test_copies_slower_than_planned_make_a_longer_run(name: str, copies: CopyCosts) -> None:
    costs = replace(uniform(families.placement(name, 4), hop=0.1), copies=copies)
    schedule = planning.plan(name, 4, 12, costs, offload=Offload.FULL)
    assert schedule.has_copies
    planned = simulate(schedule, costs)
    check(schedule, costs, planned)
    assert planned.span == pytest.approx(simulate(without_copies(schedule), costs).span, rel=1e-9)
    slow = replace(costs, copies=replace(copies, to_host=10 * copies.to_host, to_device=10 * copies.to_device))
    late = simulate(schedule, slow)
    check(schedule, slow, late)
    assert late.span > 1.5 * planned.span
    undisturbed = replace(slow, copies=CopyCosts(slow.copies.to_host, slow.copies.to_device))
    assert (late.span > simulate(schedule, undisturbed).span) == copies.disturb_each_other


def test_the_timeline_of_forwards_has_no_copies() -> None:
    schedule, costs = one_rank(ROW, 0.25, 0.5)
    assert simulate(schedule.forward_only(), costs).copies == ()
    assert offload(without_copies(schedule), costs, Offload.FULL).forward_only() == schedule.forward_only()
