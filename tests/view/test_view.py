"""Pictures, traces and text of timelines."""

import re
from pathlib import Path
from typing import Any

import pytest
from drawn import offloaded, timeline
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import v
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.time.simulate import activation_profile, simulate
from megatron.pipeline.planner.view import draw, picture, render
from megatron.pipeline.planner.view.chrome_trace import to_trace
from megatron.pipeline.planner.view.style import COLOURS, ink, number, shade, with_whole_braids


def test_text_by_hand() -> None:
    assert render(timeline("1f1b", 2, 2), width=100).splitlines() == [
        "rank 0 F0--------F1--------....................BW0=================..........BW1=================",
        "rank 1 ..........F0--------BW0=================F1--------BW1=================....................",
    ]


def test_text_without_room_for_numbers_keeps_the_kinds() -> None:
    lines = render(timeline("zb-h1", 2, 4), width=20).splitlines()
    assert lines == ["rank 0 FF.BWFBWFBWBW", "rank 1 .FBFBWFBWFBWW"]
    assert all(len(line) <= 40 for line in render(timeline("1f1b", 16, 200), width=40).splitlines())


def test_text_names_chunks_if_there_are_several() -> None:
    passes = [Pass(Kind.F, 0, 0), Pass(Kind.F, 0, 1), Pass(Kind.BW, 0, 1), Pass(Kind.BW, 0, 0)]
    schedule = Schedule("v", v(1), 1, (tuple(passes),))
    assert render(simulate(schedule, uniform(schedule.placement)), width=43) == "rank 0 F0.0--F0.1--BW0.1=======BW0.0======="[:43]


@pytest.mark.parametrize("empty", [Timeline(((), ())), Timeline(((Timed(Pass(Kind.F, 0), 3, 3),),))])
def test_timelines_without_length_are_drawn(empty: Timeline, tmp_path: Path) -> None:
    assert render(empty).startswith("rank 0")
    draw({"empty": empty}, tmp_path / "empty.png")


def test_a_picture_names_every_panel_and_number(tmp_path: Path) -> None:
    schedule = planning.plan("zb-h1", 2, 3)
    costs = uniform(schedule.placement)
    planned = simulate(schedule, costs)
    shifted = Timeline(tuple(tuple(Timed(work, start + 100, end + 100) for work, start, end in rank) for rank in planned.ranks))
    path = tmp_path / "picture.svg"
    memory = {"planned": activation_profile(schedule, planned, costs)}
    draw({"planned": planned, "measured": shifted}, path, memory, unit="ms")
    text = path.read_text()
    for label in ("planned", "measured", "span 10 ms, bubble 10.0%", "time (ms)", "rank 1", "memory", "B  backward, input"):
        assert f"<!-- {label} -->" in text
    assert "BW  backward" not in text
    assert text.count("<!-- 2 -->") >= 2 * 2 * 3  # microbatch 2 of every rank and kind, in both panels


@pytest.mark.parametrize("kind", COLOURS)
def test_numbers_are_legible_on_every_colour(kind: Kind) -> None:
    """Black digits once stood on dark blue. WCAG asks for a contrast of at least 3 for large or bold text."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for chunk in range(4):
        colour = shade(COLOURS[kind], chunk, 4)
        low, high = sorted((luminance(colour), luminance(ink(colour))))
        assert (high + 0.05) / (low + 0.05) > 3


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw({}, tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg or \.pdf"):
        draw({"x": timeline("1f1b", 1, 1)}, tmp_path / "x.jpeg")


def test_every_kind_has_a_colour_and_a_meaning_of_its_own() -> None:
    for table in (COLOURS, {kind: kind.row.meaning for kind in Kind}):
        assert set(table) == set(Kind) and len(set(table.values())) == len(Kind)
    assert len({shade(colour, chunk, 4) for colour in COLOURS.values() for chunk in range(4)}) == 4 * len(Kind)


def test_slices_have_letters() -> None:
    assert [number(Pass(Kind.F, n), 2) for n in range(4)] == ["0a", "0b", "1a", "1b"]
    assert [number(Pass(Kind.F, n), 100) for n in (25, 26, 52, 199)] == ["0z", "0aa", "0ba", "1cv"]
    assert number(Pass(Kind.F, 7)) == "7"
    sliced = timeline("1f1b", 2, 4)
    assert "F1b" in render(sliced, splits=2) and "F3" not in render(sliced, splits=2)


def test_text_has_lanes_for_copies() -> None:
    drawn = simulate(*offloaded())
    lines = render(drawn, width=60).splitlines()
    assert [line[:7] for line in lines] == ["rank 0 ", " D2H   ", " H2D   ", "rank 1 ", " D2H   ", " H2D   "]
    assert [line[7:] for line in lines[:3]] == [
        "F0--F1--........BW0=====F2--..BW1=====..BW2=====",
        "....>0-->1--....................................",
        "............<0..............<1..................",
    ]
    assert render(drawn, width=20).splitlines()[1][7:].strip(".") == ">>"


def test_pictures_have_lanes_for_copies(tmp_path: Path) -> None:
    schedule, costs = offloaded()
    draw({"boxes": simulate(schedule, costs)}, tmp_path / "boxes.svg")
    text = (tmp_path / "boxes.svg").read_text()
    assert "<!-- D2H  copy to host memory -->" in text and "<!-- H2D  copy to the device -->" in text
    assert text.count("#882255") > 1 and text.count("#332288") > 1  # not in the legend only


def test_a_trace_has_threads_for_copies() -> None:
    schedule, costs = offloaded()
    events = to_trace(simulate(schedule, costs), schedule, costs)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == ["rank 0", "rank 0 D2H", "rank 0 H2D", "rank 1", "rank 1 D2H", "rank 1 H2D"]
    found = {(names[event["tid"]], event["name"], event["dur"]) for event in events if event.get("cat") in ("D2H", "H2D")}
    assert found == {(f"rank 0 {kind}", f"{kind}{n}.0", 1e6 * time) for kind, time in (("D2H", 4), ("H2D", 2)) for n in (0, 1)}


def test_text_that_is_cut_says_so() -> None:
    drawn = timeline("zb-h2", 8, 30)
    lines = render(drawn, width=80).splitlines()
    assert all(" ... " in line for line in lines[:8])
    assert lines[0].startswith("rank 0 FFFFFFFFFFFFFFFB") and lines[7].endswith("WWW")
    note = " ".join(lines[8:])
    parts = re.fullmatch(r"left out: time (\S+) to (\S+) of 97; (\d+) of 720 passes", note)
    assert parts
    begin, end = float(parts[1]), float(parts[2])
    hidden = sum(timed.start >= begin and timed.end <= end for rank in drawn.ranks for timed in rank)
    assert hidden == int(parts[3]) > 0


def test_text_that_cuts_through_a_pass_says_so() -> None:
    passes = tuple(Timed(Pass(kind, 0), start, end) for kind, start, end in ((Kind.F, 0, 32), (Kind.B, 32, 64), (Kind.W, 64, 65)))
    first, *note = render(Timeline((passes,)), width=40).splitlines()
    assert "B" not in first
    assert " ".join(note).endswith("of 65; 0 of 3 passes")


@examples(40)
@given(p=st.integers(1, 20), m=st.integers(1, 30), width=st.integers(40, 130), weight=st.floats(0, 2))
def test_text_never_hides_silently(p: int, m: int, width: int, weight: float) -> None:
    schedule = planning.plan("zb-h1", p, m)
    drawn = simulate(schedule, uniform(schedule.placement, weight=weight))
    lines = render(drawn, width).splitlines()
    assert [line.split()[:2] for line in lines[:p]] == [["rank", str(rank)] for rank in range(p)]
    assert all(len(line) <= width for line in lines)
    letters = sum(len(re.findall("[FBW]", line)) for line in lines if line.startswith("rank "))
    visible = sum(timed.end > timed.start for rank in drawn.ranks for timed in rank)
    assert letters == visible or any(line.startswith("left out") for line in lines)


@pytest.mark.parametrize(("start", "length"), [(1e99, 1e-300), (1e99, 1.0), (0.0, 1e-320)])
def test_text_survives_any_scale(start: float, length: float) -> None:
    passes = (Timed(Pass(Kind.F, 0), 0.0, length), Timed(Pass(Kind.F, 1), start, start + length))
    text = render(Timeline((passes,)), width=60)
    assert text.startswith("rank 0 ") and len(text) < 1000 and max(map(len, text.splitlines())) <= 60


def test_narrow_passes_are_drawn_without_numbers(tmp_path: Path) -> None:
    draw({"1f1b": timeline("1f1b", 8, 40)}, tmp_path / "wide.svg")
    draw({"1f1b": timeline("1f1b", 8, 180)}, tmp_path / "narrow.svg")
    wide, narrow = ((tmp_path / f"{name}.svg").read_text() for name in ("wide", "narrow"))
    assert "<!-- 7 -->" in wide and "<!-- 7 -->" not in narrow
    assert "<!-- rank 4 -->" in narrow and len(narrow) < 2_000_000


def test_halves_of_a_braid_stand_one_above_the_other(tmp_path: Path) -> None:
    """For all of the braid's time: in pictures, and in traces, where the second lies within the first."""
    row = (Timed(Pass(Kind.F, 1), 0.0, 2.0), Timed(Pass(Kind.FBW, 0), 2.0, 3.0), Timed(Pass(Kind.BW, 1), 3.0, 5.0))
    halves = list(with_whole_braids(row))
    assert [(timed.start, timed.end, half) for timed, half in halves] == [(0.0, 3.0, 0), (0.0, 3.0, 1), (3.0, 5.0, None)]
    events = [event for event in to_trace(Timeline((row,)))["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events[:2]] == [("F1.0", 0.0, 3e6), ("FBW0.0", 0.0, 3e6)]
    draw({"braid": Timeline((row,))}, tmp_path / "braid.svg")
    boxes = re.findall(r'd="(M [^"]*z)', (tmp_path / "braid.svg").read_text(encoding="utf-8"))
    heights = {round(max(ys) - min(ys), 2) for box in boxes if (ys := [float(y) for y in re.findall(r"[ML] \S+ (\S+)", box)])}
    assert any(abs(one - 2 * other) < 0.1 for one in heights for other in heights)


@pytest.mark.parametrize(("unit", "held"), [("MiB", 26.05), ("MiB", 102400.0), ("microbatches", 7.75), ("", 1.0)])
def test_what_memory_is_in_is_inside_of_the_picture(monkeypatch: pytest.MonkeyPatch, unit: str, held: float) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(picture, "save", lambda figure, _: figures.append(figure))
    one = timeline("zb-h1", 2, 4)
    picture.draw({"it": one}, "it.png", memory={"it": [[(0.0, held)], [(1.0, held)]]}, memory_unit=unit)
    figures[0].canvas.draw()
    [(axes, label)] = [(axes, text) for axes in figures[0].axes for text in axes.texts if text.get_text().startswith("memory")]
    box, legend = label.get_window_extent(), axes.get_legend()
    assert unit in label.get_text() and box.x0 >= 0 and not box.overlaps(legend.get_window_extent())
    numbers = [tick.label1.get_window_extent() for tick in axes.yaxis.get_major_ticks()]
    assert numbers and not any(box.overlaps(number) for number in numbers)
    assert box.y0 > axes.transData.transform((0, held))[1], "above all curves"
