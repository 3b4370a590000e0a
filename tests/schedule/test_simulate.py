"""The replay against costs: when passes run, what they hold."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import costs_of, parse, schedules

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import linear, v
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, activation_profile, simulate


def test_by_hand_with_unequal_stages_and_hops() -> None:
    schedule = Schedule("by hand", linear(2), 1, parse("F0 B0 W0", "F0 BW0"))
    costs = Costs((StageCosts(1, 2, 3), StageCosts(4, 5, 6)), hop=10)
    first, second = simulate(schedule, costs).ranks
    assert [(str(work), start, end) for work, start, end in first] == [("F0.0", 0, 1), ("B0.0", 36, 38), ("W0.0", 38, 41)]
    assert [(str(work), start, end) for work, start, end in second] == [("F0.0", 11, 15), ("BW0.0", 15, 26)]


def test_on_one_rank_a_result_is_there_at_once() -> None:
    schedule = Schedule("v of one rank", v(1), 1, parse("F0.0 F0.1 BW0.1 BW0.0"))
    assert simulate(schedule, uniform(schedule.placement, 2, 2, 2, hop=100)).makespan == 6


@given(st.data())
def test_every_pass_starts_as_soon_as_it_can(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule.placement))
    timeline = simulate(schedule, costs)
    ends = {(rank, timed.work): timed.end for rank, row in enumerate(timeline.ranks) for timed in row}
    ways = {(link.sender, link.receiver): link.seconds + link.latency for link in costs.links}
    turns: dict[Any, Any] = {}  # of messages that stand in line
    free: dict[Any, Any] = {}
    placement = schedule.placement
    for link, (work, _, end) in ((each, timed) for each in costs.links for timed in timeline.ranks[each.sender]):
        stage = placement.stage(link.sender, work.chunk) + (1 if work.kind is Kind.F else -1)
        if work.kind is not Kind.W and 0 <= stage < placement.depth and placement.home(stage)[0] == link.receiver:
            turns[link.sender, work] = max(free.get(link, 0), end)
            free[link] = turns[link.sender, work] + link.seconds
    for rank, row in enumerate(timeline.ranks):
        assert tuple(timed.work for timed in row) == schedule.passes[rank]
        now = 0.0
        for work, start, end in row:
            inputs = [
                turns.get((home, other), ends[home, other]) + ways.get((home, rank), costs.hop)
                if home != rank
                else ends[home, other]
                for home, other in schedule.predecessors(rank, work)
            ]
            assert start == max([now, *inputs])
            assert end == start + costs.stages[schedule.placement.stage(rank, work.chunk)].seconds(work.kind)
            now = end


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("F0 B0 W0", "B0 F0 W0"), "rank 1 is stuck at B0.0: it needs F0.0 of rank 1"),
        (
            ("F0 B0 W0", "F0 W0"),
            "rank 1 is stuck at W0.0: it needs B0.0 of rank 1|rank 0 is stuck at B0.0: it needs B0.0 of rank 1",
        ),
        (("F0 B0 F1 B1", "F1 B1 F0 B0"), "rank 1 is stuck at F1.0: it needs F1.0 of rank 0|rank 0 is stuck at B0.0"),
    ],
)
def test_a_schedule_that_cannot_finish_names_the_stuck_pass(rows: tuple[str, ...], message: str) -> None:
    schedule = Schedule("stuck", linear(2), 2, parse(*rows))
    with pytest.raises(ValueError, match=message):
        simulate(schedule, uniform(schedule.placement))


def test_costs_of_another_placement_are_refused() -> None:
    schedule = planning.plan("1f1b", 2, 2)
    with pytest.raises(ValueError, match="costs of 4 stages for a placement of 2"):
        simulate(schedule, uniform(linear(4)))


def test_memory_is_allocated_when_f_starts_and_freed_when_b_and_w_end() -> None:
    schedule = Schedule("by hand", linear(1), 2, parse("F0 F1 B0 W0 BW1"))
    costs = uniform(schedule.placement, activation=4, retained=1)
    timeline = simulate(schedule, costs)
    assert activation_profile(schedule, timeline, costs) == [[(0, 4), (1, 8), (3, 5), (4, 4), (6, 0)]]
    assert activation_peaks(schedule, costs) == [8]


@given(st.data())
def test_the_peak_is_the_top_of_the_profile_and_all_is_freed(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule.placement))
    profile = activation_profile(schedule, simulate(schedule, costs), costs)
    assert activation_peaks(schedule, costs) == [max(held for _, held in steps) for steps in profile]
    assert all(steps[-1][1] == 0 for steps in profile)
    assert all(times == sorted(times) for times in ([time for time, _ in steps] for steps in profile))


def test_ranks_that_never_idle_have_no_bubble() -> None:
    """Sums of floats stray: ten passes of 1/10 one after another may take less than they do together."""
    ends = list(accumulate([0.1] * 10, initial=0.3))
    row = tuple(Timed(Pass(Kind.F, at), start, end) for at, (start, end) in enumerate(pairwise(ends)))
    several = [Timeline((row[:count],) * 3) for count in range(1, 11)]
    assert min(timeline.span_bubble_rate for timeline in several) >= 0
    assert min(timeline.bubble_rate for timeline in several) >= 0
