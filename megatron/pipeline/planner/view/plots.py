"""Plots of many schedules or trainings: bubble against memory, throughput against memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from megatron.pipeline.planner.view.style import INK, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette.
_BLUE, _ORANGE, _RED, _GREEN, _PINK, _DARK = "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#0072B2"
_FAINT, _GREY = "#8A8A8A", "#666666"
_FONT = 9.0  # points
# Where a label is tried first: above and to the right, clear of the frontier, which runs right and down from its points.
_DIRECTIONS = ((1, 1), (-1, -1), (1, 0), (0, 1), (-1, 0), (0, -1), (1, -1), (-1, 1))
_LINE = 0.19  # inches of a line of text
_MARKER = 7  # points across
_EXPLAINED = (
    "Large dots: the fastest in that much memory. Small dots: other trainings that were planned. Dotted: what a GPU may take."
)

Box = tuple[float, float, float, float]  # left, bottom, right, top
Item = TypeVar("Item")


def pareto(items: Iterable[Item], key: Callable[[Item], tuple[float, float]]) -> list[Item]:
    """The items that are not dominated: no other is at most as large in both numbers of ``key``. By the first number."""
    best: list[Item] = []
    for item in sorted(items, key=key):
        if not best or key(item)[1] < key(best[-1])[1]:
            best.append(item)
    return best


class Point(NamedTuple):
    """One schedule: its name, its bubble rate (0..1), and the most activations that a rank holds, in any unit."""

    title: str
    bubble: float
    memory: float


class PlottedTraining(NamedTuple):
    """One training: its name, tokens per second, and GiB of its fullest GPU."""

    name: str
    tokens_per_second: float
    memory: float


def draw_pareto(
    points: Sequence[Point],
    path: str | Path,
    reference: float | None = None,
    title: str = "",
    unit: str = "microbatches",
    measured: str = "time",
) -> None:
    """Draw the bubble of schedules against their memory, and the frontier: the least bubble at every amount of memory.

    Args:
        points: the schedules. Those at the same place share a marker, and those whose markers touch a label.
        path: where the picture goes; its suffix, .png, .svg or .pdf, is the format.
        reference: the memory of 1F1B, in the same unit; adds an axis in multiples of it.
        title: of the plot, such as the shape and the costs.
        unit: of memory, for the axis.
        measured: what bubbles are shares of, for the axis, such as makespan.

    Raises:
        ValueError: there is nothing to draw, the suffix is another one, or the reference is not positive.
        OSError: the file cannot be written.
    """
    if not points:
        raise ValueError("nothing to draw: give at least one schedule")
    if reference is not None and not reference > 0:
        raise ValueError(f"the memory of 1F1B must be more than 0, got {reference:g}")
    figure, axes = _axes(9.0, 5.6, (0.08, 0.11, 0.89, 0.74), title)
    most, widest = max(point.memory for point in points), max(point.bubble for point in points)
    axes.set_xlim(0, most * 1.15 or 1)
    axes.set_ylim(-0.04 * (widest or 1), 1.15 * (widest or 1))
    best = pareto(points, lambda point: (point.memory, point.bubble))
    _steps(axes, [(point.memory, point.bubble) for point in best], axes.get_xlim()[1], _RED, alpha=0.7)
    places: dict[tuple[float, float], list[str]] = {}
    for point in points:
        places.setdefault((round(point.memory, 9), round(point.bubble, 9)), []).append(point.title)
    winning = {(round(point.memory, 9), round(point.bubble, 9)) for point in best}
    for place in places:
        axes.plot(*place, "o", color=_RED if place in winning else _BLUE, markersize=_MARKER, markeredgecolor="white", zorder=3)
    groups = _touching(axes, places)
    names = [", ".join(title for place in group for title in places[place]) for group in groups]
    _label(axes, [group[-1] for group in groups], names, [(x, y, x, y) for x, y in places])
    axes.set_xlabel(f"peak activation memory of a rank ({unit})", fontsize=_FONT, color=INK)
    axes.set_ylabel(f"bubble (idle share of the {measured})", fontsize=_FONT, color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}" if widest < 0.05 else f"{value:.0%}")
    if reference is not None:
        scales = (partial(operator.mul, 1 / reference), partial(operator.mul, reference))
        multiples = axes.secondary_xaxis("top", functions=scales)
        multiples.set_xlabel("multiple of 1F1B's memory", fontsize=_FONT, color=INK)
        multiples.tick_params(labelsize=_FONT, colors=INK, length=0)
    save(figure, path)


def draw_throughput(
    groups: Mapping[str, Sequence[PlottedTraining]], path: str | Path, memory: float, title: str = "", equal: float = 1.0
) -> None:
    """Draw trainings, and the front of each group: the most tokens per second in every amount of memory.

    Args:
        groups: trainings by what they have in common; the first group's front is numbered, and its names stand below.
        path: where the picture goes; its suffix, .png or .svg, is the format.
        memory: GiB that a training may take of a GPU.
        title: of the plot, such as the cluster.
        equal: the share of the most tokens per second from which on trainings are as good as the best within the error: a band.

    Raises:
        ValueError: there is nothing to draw.
        OSError: the file cannot be written.
    """
    if not all(groups.values()):
        raise ValueError("nothing to draw: give at least one training of each group")
    fronts = {
        name: pareto(group, lambda training: (training.memory, -training.tokens_per_second)) for name, group in groups.items()
    }
    named = next(iter(fronts.values()))[::-1]
    below = _LINE * len(named) + 0.8  # inches, for the names
    height = 5.0 + below
    figure, axes = _axes(9.6, height, (0.09, below / height, 0.88, 4.05 / height), title.replace("$", r"\$"))
    _show_fronts(axes, [training for front in fronts.values() for training in front], memory)
    axes.axvline(memory, color=INK, linewidth=1, linestyle=":")
    most = max(one.tokens_per_second for group in groups.values() for one in group)
    if equal < 1:
        axes.axhspan(equal * most, most, color=_GREY, alpha=0.15, linewidth=0, label="equal within the error")
    for (name, group), colour in zip(groups.items(), (_RED, _DARK), strict=False):
        all_, best = ([(one.memory, one.tokens_per_second) for one in part] for part in (group, fronts[name]))
        axes.plot(*zip(*all_, strict=True), "o", color=colour, alpha=0.25, markersize=4)
        _steps(axes, best, memory, colour)
        axes.plot(*zip(*best, strict=True), "o", color=colour, markersize=6, label=name)
    lines = [[(one.memory, one.tokens_per_second) for one in front] for front in fronts.values()]
    steps = [step for line in lines for step in _segments(line, memory)]
    _label(axes, [(one.memory, one.tokens_per_second) for one in named], [str(n) for n, _ in enumerate(named, 1)], steps)
    words = [f"{n}  {one.tokens_per_second:,.0f} tokens/s  {one.memory:.1f} GiB  {one.name}" for n, one in enumerate(named, 1)]
    figure.text(0.09, _LINE / 2 / height, "\n".join(words), va="bottom", fontsize=_FONT, color=INK, linespacing=1.4)
    axes.set_xlabel("GiB of the fullest GPU", fontsize=_FONT, color=INK)
    axes.set_ylabel("tokens per second", fontsize=_FONT, color=INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(fontsize=_FONT, frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, handletextpad=0.2)
    figure.text(0.09, 1 - 0.36 / height, _EXPLAINED, va="top", fontsize=_FONT, color=_GREY)
    save(figure, path)


def label_places(
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    frame: Box,
    marker: float = 5.0,
    blocked: Sequence[Box] = (),
) -> list[Box]:
    """Find a place for each label that covers no other label and no marker, as near to its own marker as possible.

    Args:
        anchors: the centres of the markers.
        sizes: width and height of each label, in the same unit.
        frame: what labels must stay within. Where no place is free, a label goes where it overlaps least.
        marker: half the width of a marker.
        blocked: what labels should not cover either, such as lines.
    """
    taken: list[Box] = [*blocked, *((x - marker, y - marker, x + marker, y + marker) for x, y in anchors)]
    already = len(taken)
    for (x, y), (width, height) in zip(anchors, sizes, strict=True):
        candidates: list[tuple[float, float, Box]] = []
        for ring in range(12):
            for toward_x, toward_y in _DIRECTIONS:
                distance = marker + 1 + ring * height * 0.8
                left = x + toward_x * (distance + width / 2) - width / 2
                bottom = y + toward_y * (distance + height / 2) - height / 2
                box = (left, bottom, left + width, bottom + height)
                inside = frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
                covered = sum(_overlap(box, other) for other in taken) + (0 if inside else width * height)
                candidates.append((covered, len(candidates), box))
            if min(candidates)[0] == 0:
                break
        taken.append(min(candidates)[2])
    return taken[already:]


def _axes(width: float, height: float, box: Box, title: str) -> tuple[Figure, Axes]:
    """A figure of that many inches, with axes in a box in shares of it (left, bottom, width, height)."""
    from matplotlib.figure import Figure  # takes longer to import than everything else that ``mpipe`` does

    figure = Figure(figsize=(width, height), facecolor="white", dpi=160)
    axes = figure.add_axes(box)
    axes.grid(color="#E8E8E8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=_FONT, colors=INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.text(box[0], 1 - 0.09 / height, title, va="top", fontsize=_FONT + 2, fontweight="bold", color=INK)
    return figure, axes


def _steps(axes: Axes, best: Sequence[tuple[float, float]], end: float, colour: str, alpha: float = 1.0) -> None:
    """Draw a front as steps, its last one up to ``end``."""
    x, y = zip(*best, (end, best[-1][1]), strict=True)
    axes.step(x, y, where="post", color=colour, linewidth=1.4, alpha=alpha, zorder=1)


def _touching(axes: Axes, places: Iterable[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Places by memory and bubble, those together whose markers touch."""
    groups: list[list[tuple[float, float]]] = []
    for place in sorted(places):
        x, y = axes.transData.transform(place) * 72 / axes.figure.dpi
        ends = ((group, axes.transData.transform(group[-1]) * 72 / axes.figure.dpi) for group in groups)
        near = [group for group, end in ends if math.hypot(x - end[0], y - end[1]) < _MARKER]
        near[0].append(place) if near else groups.append([place])
    return groups


def _segments(best: Sequence[tuple[float, float]], end: float) -> list[Box]:
    """The lines that ``_steps`` draws, as boxes without a height or a width."""
    after = [*best[1:], (end, best[-1][1])]
    level = [(x, y, right, y) for (x, y), (right, _) in zip(best, after, strict=True)]
    return level + [(x, min(low, y), x, max(low, y)) for (_, low), (x, y) in pairwise(best)]


def _label(axes: Axes, places: Sequence[tuple[float, float]], names: Sequence[str], lines: Sequence[Box] = ()) -> None:
    points = 72 / axes.figure.dpi
    corners = [[axes.transData.transform(corner) * points for corner in ((x, y), (right, top))] for x, y, right, top in lines]
    blocked = [(low[0] - 1, low[1] - 1, high[0] + 1, high[1] + 1) for low, high in corners]
    anchors = [tuple(axes.transData.transform(place) * points) for place in places]
    sizes = [(0.6 * _FONT * len(name), 1.25 * _FONT) for name in names]
    (left, bottom), (right, top) = axes.bbox.get_points() * points
    boxes = label_places(anchors, sizes, (left, bottom, right, top), blocked=blocked)
    for anchor, name, box in zip(anchors, names, boxes, strict=True):
        axes.annotate(
            name,
            anchor,
            xytext=((box[0] + box[2]) / 2, (box[1] + box[3]) / 2),
            xycoords="figure points",
            textcoords="figure points",
            ha="center",
            va="center",
            fontsize=_FONT,
            color=INK,
            arrowprops={"arrowstyle": "-", "color": _FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4},
        )


def _show_fronts(axes: Axes, best: Sequence[PlottedTraining], memory: float) -> None:
    """Limit the axes to the surroundings of the fronts: trainings far below would leave most of the picture empty."""
    speeds = [training.tokens_per_second for training in best]
    margin = 0.15 * (max(speeds) - min(speeds)) + 0.02 * max(speeds)
    axes.set_ylim(max(0.0, min(0.95 * max(speeds), *speeds) - 2 * margin), max(speeds) + margin)  # an error of 4 % in it
    least = min(training.memory for training in best)
    aside = 0.06 * (memory - least) + 0.01 * memory
    axes.set_xlim(max(0.0, least - 1.5 * aside), memory + aside)


def _overlap(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0
