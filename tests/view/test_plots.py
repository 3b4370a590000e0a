"""Plots of many schedules."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.planner.view import Point, draw_pareto, plots
from megatron.pipeline.planner.view.plots import label_places, pareto


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_the_frontier_is_what_nothing_beats(places: list[tuple[int, int]]) -> None:
    points = [Point(str(index), *place) for index, place in enumerate(places)]
    beaten = {
        (one.bubble, one.memory)
        for one in points
        if any(other.bubble <= one.bubble and other.memory <= one.memory and other[1:] != one[1:] for other in points)
    }
    best = pareto(points, lambda point: (point.memory, point.bubble))
    assert [(point.bubble, point.memory) for point in best] == sorted(set(places) - beaten, key=lambda place: place[1])


@examples(50)
@given(st.lists(st.tuples(st.floats(50, 350), st.floats(50, 250)), min_size=1, max_size=15))
def test_labels_do_not_cover_each_other(anchors: list[tuple[float, float]]) -> None:
    boxes = label_places(anchors, [(40, 10)] * len(anchors), (0, 0, 400, 300))
    for index, one in enumerate(boxes):
        for other in boxes[:index]:
            assert one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]
        assert one[0] >= 0 and one[2] <= 400 and one[1] >= 0 and one[3] <= 300


def test_a_pareto_plot_names_every_schedule(tmp_path: Path) -> None:
    points = [Point("1f1b", 0.2, 8), Point("zb-h1", 0.1, 8), Point("zb-h2", 0.0, 15), Point("twin", 0.1, 8)]
    draw_pareto(points, tmp_path / "p.svg", reference=8, title="8 ranks")
    text = (tmp_path / "p.svg").read_text()
    for label in ("1f1b", "zb-h1, twin", "zb-h2", "8 ranks", "multiple of 1F1B's memory"):
        assert f"<!-- {label} -->" in text
    draw_pareto([Point("only", 0.0, 0.0)], tmp_path / "p.png")
    draw_pareto(points, tmp_path / "p.pdf")
    assert (tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")
    close = [Point(f"zb-{at}", 0.05 + at / 1000, 8) for at in range(5)]
    draw_pareto([*close, *points], tmp_path / "p.svg")
    assert "<!-- zb-0, zb-1, zb-2, zb-3, zb-4 -->" in (tmp_path / "p.svg").read_text()
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_pareto([], tmp_path / "p.svg")
    with pytest.raises(ValueError, match="more than 0, got 0"):
        draw_pareto(points, tmp_path / "p.svg", reference=0)
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg or \.pdf"):
        draw_pareto(points, tmp_path / "p.gif")


def test_numbers_of_a_front_stand_beside_their_dots_and_on_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, _: figures.append(figure))
    places = [(42, 20.0), (43, 21.0), (44, 22.5), (58, 24.0), (59, 24.3), (61, 24.5), (70, 25.0), (75, 25.2)]
    ours = [plots.PlottedTraining(f"training {memory}", 1000 * speed, memory) for memory, speed in places]
    stock = [plots.PlottedTraining("stock", 19_800, 42.5), plots.PlottedTraining("stock", 24_100, 58.5)]
    plots.draw_throughput({"ours, stock included": [*ours, *stock], "stock": stock}, "it.png", 76)
    figure = figures[0]
    figure.canvas.draw()
    axes = figure.axes[0]
    numbers = {text.get_text(): text for text in axes.texts if text.get_text().isdigit()}
    lines = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
    assert len(numbers) == 9 and len(lines) == 2
    for text in numbers.values():
        box = text.get_window_extent()
        for line in lines:
            corners = axes.transData.transform(list(zip(*line.get_data(), strict=True)))
            for (left, low), (right, high) in pairwise(corners):
                assert not (left < box.x1 and right > box.x0 and low < box.y1 and low > box.y0), "on a level line"
                assert not (box.x0 < right < box.x1 and min(low, high) < box.y1 and max(low, high) > box.y0), "on a step"
        dot = text.xy  # points
        middle = (box.x0 + box.x1) / 2 * 72 / figure.dpi, (box.y0 + box.y1) / 2 * 72 / figure.dpi
        assert math.dist(dot, middle) < 45, "points"
