"""Schedules for other tools: torch's CSV, and traces for Perfetto."""

import json
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import costs_of, parse, schedules

from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import linear, v
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.lower.lower import messages
from megatron.pipeline.planner.schedule.lower.torch_csv import from_csv, to_csv
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.transform import recompute
from megatron.pipeline.planner.view.chrome_trace import to_trace

V = Schedule("by hand", v(2), 1, parse("F0.0 F0.1 B0.1 W0.1 BW0.0", "F0.0 F0.1 BW0.1 B0.0 W0.0"))
V_CSV = "0F0,3F0,3I0,3W0,0B0\n1F0,2F0,2B0,1I0,1W0\n"


def test_csv_by_hand() -> None:
    assert to_csv(V) == V_CSV
    assert from_csv(V_CSV, "by hand") == V


@given(schedules())
def test_what_is_written_as_csv_is_read_back(schedule: Schedule) -> None:
    text = to_csv(schedule)
    read = from_csv(text, schedule.name)
    assert to_csv(read) == text
    ascending = all(list(stages) == sorted(stages) for stages in schedule.placement.stages)
    assert (read == schedule) == ascending, "chunks are told apart by the order of their stages"


def test_csv_of_torch_itself() -> None:
    """Bubbles, as torch's own schedules dump them, and the overlapped pairs of its DualPipeV."""
    text = '0F0,,0F1,0B0,"(0F2;0B1)OVERLAP_F_B",0B2\r\n,1F0,1B0,(1F1;1I1)OVERLAP_F_B,1W1, 1F2 ,1B2\r\n,,\r\n\r\n'
    rows = parse("F0 F1 BW0 F2 BW1 BW2", "F0 BW0 F1 B1 W1 F2 BW2")
    assert from_csv(text, "torch") == Schedule("torch", linear(2), 3, rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a schedule: the CSV has no passes"),
        ("0F0,0B0\n,\n2F0,2B0", "rank 1 has no passes"),
        ("0F0,0B0\n1F0,1X0", "line 2, cell 2: '1X0' is not a pass: expected STAGE KIND MICROBATCH such as 2F0"),
        ("0F0,-1F0", "line 1, cell 2: '-1F0' is not a pass"),
        ("0F0,0F", "line 1, cell 2: '0F' is not a pass"),
        ("0F0,0F" + "9" * 5000, "line 1, cell 2: '0F999.*' is not a pass"),
        ("(0F0;x)OVERLAP_F_B", "line 1, cell 1: 'x' is not a pass"),
        ("0F0,0SEND_F0", "line 1, cell 2: '0SEND_F0' is no computation; leave communication out"),
        ("0F0,0B0\n1F0,0F1", "line 2, cell 2: stage 0 is on rank 1 here and on rank 0 before"),
        ("0F0,0B0\n1F0,2F0", "every rank must hold the same number of chunks"),
        ("0F0,0B0\n2F0,2B0", r"every stage 0\.\.1 needs exactly one"),
        ('0F0,"0B0', "line 1: not CSV"),
        ("x" * 200_000, "line 1: not CSV"),
    ],
)
def test_csv_that_cannot_be_read_names_line_and_cell(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_csv(text, "broken")


CELLS = ["", " 1F0", "0F0", "0F1", "1B0", "0I0", "0W0", "(1F1;0B0)OVERLAP_F_B", "(0F0", "0SEND_F1", '"', "-1F0", "7"]


@given(st.lists(st.lists(st.sampled_from(CELLS), max_size=5).map(",".join), max_size=3).map("\n".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        schedule = from_csv(text, "any")
    except ValueError:
        return
    assert from_csv(to_csv(schedule), "any") == schedule


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (recompute(V, {1}), "torch's CSV has no kind for passes R, which by hand has"),
        (
            Schedule("away", linear(1), 2, parse("F0 D2H0 F1 H2D0 BW0 BW1")),
            "no kind for passes D2H and H2D, which away has: .* or plan it without",
        ),
        (Schedule("sliced", linear(1), 1, parse("F0 F1 BW1 BW0"), splits=2), "and sliced cuts each into 2 slices"),
    ],
)
def test_what_the_csv_cannot_say_is_named(schedule: Schedule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_csv(schedule)


def _by_kind(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    events = defaultdict(list)
    for event in trace["traceEvents"]:
        events[event["ph"]].append(event)
    return events


def test_trace_by_hand() -> None:
    costs = uniform(V.placement, 2, 2, 2, hop=0.5)
    events = _by_kind(json.loads(json.dumps(to_trace(simulate(V, costs), V, costs, process=7))))
    names = [(event["name"], event["tid"], event["args"]) for event in events["M"]]
    assert names[:3] == [
        ("process_name", 0, {"name": "by hand"}),
        ("thread_name", 0, {"name": "rank 0"}),
        ("thread_sort_index", 0, {"sort_index": 0}),
    ]
    assert {event["pid"] for kind in events.values() for event in kind} == {7}
    first = {"ph": "X", "name": "F0.0", "cat": "F", "pid": 7}
    assert events["X"][:2] == [
        {**first, "tid": 0, "ts": 0, "dur": 1e6, "args": {"microbatch": 0, "chunk": 0, "stage": 0}},
        {**first, "tid": 1, "ts": 1.5e6, "dur": 1e6, "args": {"microbatch": 0, "chunk": 0, "stage": 1}},
    ]
    begin, end = events["s"][0], events["f"][0]
    assert (begin["tid"], begin["ts"], end["tid"], end["ts"]) == (0, 0.99e6, 1, 1.5e6)
    assert begin["id"] == end["id"]
    assert end["bp"] == "e"
    rank_0 = [(event["ts"], event["args"]["held"]) for event in events["C"] if event["tid"] == 0]
    assert rank_0[:2] == [(0, 0.5), (4e6, 1)]
    assert rank_0[-1][1] == 0


@given(st.data())
def test_traces_hold_every_pass_flow_and_peak(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule.placement))
    timeline = simulate(schedule, costs)
    trace = json.loads(json.dumps(to_trace(timeline, schedule, costs)))
    events = _by_kind(trace)
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)
    passes = Counter((event["tid"], event["name"], event["ts"], event["dur"]) for event in events["X"])
    assert passes == Counter(
        (rank, str(work), float(start) * 1e6, float(end - start) * 1e6)
        for rank, row in enumerate(timeline.ranks)
        for work, start, end in row
    )
    starts = {event["id"]: event for event in events["s"]}
    ends = {event["id"]: event for event in events["f"]}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(events["s"]) == len(list(messages(schedule)))
    assert all(starts[number]["ts"] <= ends[number]["ts"] for number in starts)
    for rank, peak in enumerate(activation_peaks(schedule, costs)):
        assert max(event["args"]["held"] for event in events["C"] if event["tid"] == rank) == peak


def test_a_measured_timeline_needs_no_schedule() -> None:
    timeline = Timeline(((Timed(Pass(Kind.F, 3), 10.25, 10.5),), (Timed(Pass(Kind.B, 3, 1), 12.0, 12.125),), ()))
    events = _by_kind(to_trace(timeline, name="measured"))
    assert [(event["name"], event["ts"], event["dur"], event["args"]) for event in events["X"]] == [
        ("F3.0", 0, 250_000, {"microbatch": 3, "chunk": 0}),
        ("B3.1", 1_750_000, 125_000, {"microbatch": 3, "chunk": 1}),
    ]
    assert events.keys() == {"M", "X"}
    assert to_trace(Timeline(((), ())))["traceEvents"][0]["args"] == {"name": "pipeline"}


def test_slices_are_told_apart_from_microbatches() -> None:
    schedule = Schedule("sliced", linear(1), 2, parse("F0 F1 F2 F3 BW1 BW0 BW3 BW2"), splits=2)
    events = _by_kind(to_trace(simulate(schedule, uniform(schedule.placement)), schedule))
    assert [(event["args"]["microbatch"], event["args"]["slice"]) for event in events["X"]][:4] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_a_trace_of_another_schedule_is_refused() -> None:
    timeline = simulate(V, uniform(V.placement))
    with pytest.raises(ValueError, match="rank 0 of the timeline ran other passes than by hand"):
        to_trace(timeline, Schedule("by hand", v(2), 1, (V.passes[0][::-1], V.passes[1])))
    with pytest.raises(ValueError, match="a timeline of 2 ranks is not one of one with 1"):
        to_trace(timeline, Schedule("one", linear(1), 1, parse("F0")))
