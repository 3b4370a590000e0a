"""Passes, placements, costs, schedules and timelines as data."""

import json

import pytest
from hypothesis import given
from schedule_strategies import placements, schedules

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import Placement, from_rows, interleaved, linear, v, wave
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.time.simulate import simulate


@pytest.mark.parametrize("text", ["", "F0", "f0.0", "F-1.0", "X0.0", "F0.0 ", "WB0.0", None, 3])
def test_a_text_that_is_no_pass_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is not a pass"):
        Pass.parse(text)  # type: ignore[arg-type]


def test_placements_by_hand() -> None:
    assert linear(3).stages == ((0,), (1,), (2,))
    assert interleaved(2, 2).stages == ((0, 2), (1, 3))
    assert v(2).stages == ((0, 3), (1, 2))
    assert wave(2, 3).stages == ((0, 3, 4), (1, 2, 5))
    assert from_rows([[1], [0]]).home(0) == (1, 0)


@given(placements())
def test_home_is_the_inverse_of_stage(placement: Placement) -> None:
    for stage in range(placement.last_stage + 1):
        assert placement.stage(*placement.home(stage)) == stage


@pytest.mark.parametrize("rows", [[], [[]], [[0], [0]], [[0, 1], [2]], [[1], [2]]])
def test_a_bad_placement_is_refused(rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"rank|chunk"):
        from_rows(rows)


def test_costs() -> None:
    costs = uniform(v(2), 2, 4, 6, hop=0.5, activation=1, retained=0.5)
    assert costs.stages[0] == StageCosts(1, 2, 3, 0.5, 0.25)
    assert costs.stages[0].seconds(Kind.BW) == 5
    assert sum(costs.stages[0].allocated(kind) for kind in (Kind.F, Kind.B, Kind.W)) == 0
    for broken in (StageCosts(-1, 1, 1), StageCosts(1, float("nan"), 1), StageCosts(1, 1, 1, activation=1, movable=2)):
        with pytest.raises(ValueError, match="stage 0"):
            Costs((broken,))
    assert StageCosts(1, 1, 1, activation=1, retained=3).backward_allocates == 2  # B makes them again, and holds them until W


@given(schedules())
def test_a_schedule_survives_json(schedule: Schedule) -> None:
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"passes": None}, "passes"),
        ({"passes": [["F0.0"]]}, "passes of 1 ranks"),
        ({"microbatches": 1.5}, "microbatches"),
        ({"microbatches": True}, "microbatches"),
        ({"placement": [[0], [0]]}, "stage"),
        ({"placement": 3}, "placement"),
        ({"replicas": 2}, "hold every stage several times .* are gone: plan dualpipe-v"),
        ({"passes": [["F0.0"], ["X"]]}, "'X' is not a pass"),
    ],
)
def test_a_bad_file_says_what_is_wrong(change: dict[str, object], message: str) -> None:
    data = json.loads(planning.plan("zb-h1", 2, 2).to_json()) | change
    with pytest.raises(ValueError, match=message):
        Schedule.from_json(json.dumps(data))


def test_a_timeline_survives_json_in_its_documented_form() -> None:
    schedule = planning.plan("zb-h1", 2, 2)
    timeline = simulate(schedule, uniform(schedule.placement, 1.5, 2, 1, hop=0.25))
    data = json.loads(timeline.to_json())
    assert data["ranks"][1][0] == ["F0.0", 1.75, 3.25]
    assert Timeline.from_json(timeline.to_json()) == timeline


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[]",
        "{}",
        '{"ranks": 3}',
        '{"ranks": [[["F0.0", 1]]]}',
        '{"ranks": [[["F0.0", 2, 1]]]}',
        '{"ranks": [[["F0.0", 0, NaN]]]}',
    ],
)
def test_a_text_that_is_no_timeline_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a timeline"):
        Timeline.from_json(text)


def test_span_and_makespan_by_hand() -> None:
    timeline = Timeline(((Timed(Pass(Kind.F, 0), 0, 1), Timed(Pass(Kind.F, 1), 1, 3)), (Timed(Pass(Kind.F, 0), 2, 6),)))
    assert (timeline.makespan, timeline.span, timeline.work) == (6, 4, 3.5)
    assert (timeline.span_bubble_rate, timeline.bubble_rate) == (0.125, 2.5 / 6)
    assert Timeline(((), ())).bubble_rate == 0
