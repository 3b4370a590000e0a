"""Pictures and text of timelines."""

from pathlib import Path

import pytest

from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.costs import uniform
from megatron.pipeline.schedule.passes import Kind, Pass
from megatron.pipeline.schedule.placement import v
from megatron.pipeline.schedule.schedule import Schedule
from megatron.pipeline.schedule.simulate import activation_profile, simulate
from megatron.pipeline.schedule.timeline import Timed, Timeline
from megatron.pipeline.view import draw, render


def timeline(name: str, ranks: int, microbatches: int) -> Timeline:
    schedule = families.plan(name, ranks, microbatches)
    return simulate(schedule, uniform(schedule.placement))


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
    schedule = families.plan("zb-h1", 2, 3)
    costs = uniform(schedule.placement)
    planned = simulate(schedule, costs)
    shifted = Timeline(tuple(tuple(Timed(work, start + 100, end + 100) for work, start, end in rank) for rank in planned.ranks))
    path = tmp_path / "picture.svg"
    memory = {"planned": activation_profile(schedule, planned, costs)}
    draw({"planned": planned, "measured": shifted}, path, memory, unit="ms")
    text = path.read_text()
    for label in ("planned", "measured", "span 10, bubble 10.0%", "time (ms)", "rank 1", "memory", "B  backward, input"):
        assert f"<!-- {label} -->" in text
    assert "BW  backward" not in text
    assert text.count("<!-- 2 -->") >= 2 * 2 * 3  # microbatch 2 of every rank and kind, in both panels


def test_a_wide_picture_leaves_the_numbers_out(tmp_path: Path) -> None:
    path = tmp_path / "wide.svg"
    draw({"1f1b": timeline("1f1b", 4, 150)}, path)
    assert "<!-- 149 -->" not in path.read_text()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw({}, tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"must end in \.png or \.svg"):
        draw({"x": timeline("1f1b", 1, 1)}, tmp_path / "x.jpeg")
