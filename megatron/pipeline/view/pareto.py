"""Schedules compared in one plot: how much of the time is idle against how much memory is held."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

_INK, _FAINT, _ACCENT, _REST = "#222222", "#8A8A8A", "#D55E00", "#56B4E9"
_WIDTH, _HEIGHT, _FONT = 9.0, 5.6, 9.0  # inches, inches, points

# Where a label is tried first: above and to the right, clear of the frontier, which runs right and down from its points.
_DIRECTIONS = ((1, 1), (-1, -1), (1, 0), (0, 1), (-1, 0), (0, -1), (1, -1), (-1, 1))

Box = tuple[float, float, float, float]  # left, bottom, right, top


class Point(NamedTuple):
    """One schedule: its name, its bubble rate (0..1), and the most activations that a rank holds, in any unit."""

    title: str
    bubble: float
    memory: float


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats, neither holding less at the same bubble nor idling less at the same memory, by memory."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.memory, point.bubble)):
        if not best or point.bubble < best[-1].bubble:
            best.append(point)
    return best


def draw_pareto(
    points: Sequence[Point], path: str | Path, reference: float | None = None, title: str = "", unit: str = "microbatches"
) -> None:
    """Draw the bubble of schedules against their memory, and the frontier: the least bubble at every amount of memory.

    Args:
        points: the schedules. Those at the same place share a marker and a label.
        path: where the picture goes; its suffix, .png or .svg, is the format.
        reference: the memory of 1F1B, in the same unit; adds an axis in multiples of it.
        title: of the plot, such as the shape and the costs.
        unit: of memory, for the axis.

    Raises:
        ValueError: there is nothing to draw, the suffix is another one, or the reference is not positive.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    if not points:
        raise ValueError("nothing to draw: give at least one schedule")
    if Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"cannot draw {path}: the file name must end in .png or .svg")
    if reference is not None and not reference > 0:
        raise ValueError(f"the memory of 1F1B must be more than 0, got {reference:g}")
    figure = Figure(figsize=(_WIDTH, _HEIGHT), facecolor="white", dpi=160)
    axes = figure.add_axes((0.08, 0.11, 0.89, 0.74))
    most, widest = max(point.memory for point in points), max(point.bubble for point in points)
    axes.set_xlim(0, most * 1.15 or 1)
    axes.set_ylim(-0.04 * (widest or 1), 1.15 * (widest or 1))
    best = frontier(points)
    axes.step(
        [point.memory for point in best] + [axes.get_xlim()[1]],
        [point.bubble for point in best] + [best[-1].bubble],
        where="post",
        color=_ACCENT,
        linewidth=1.4,
        alpha=0.7,
        zorder=1,
    )
    places: dict[tuple[float, float], list[str]] = {}
    for point in points:
        places.setdefault((round(point.memory, 9), round(point.bubble, 9)), []).append(point.title)
    winning = {(round(point.memory, 9), round(point.bubble, 9)) for point in best}
    for place in places:
        axes.plot(*place, "o", color=_ACCENT if place in winning else _REST, markersize=7, markeredgecolor="white", zorder=3)
    anchors = [tuple(axes.transData.transform(place) * 72 / figure.dpi) for place in places]
    names = [", ".join(titles) for titles in places.values()]
    sizes = [(0.6 * _FONT * len(name), 1.25 * _FONT) for name in names]
    frame = (0.08 * _WIDTH * 72, 0.11 * _HEIGHT * 72, 0.97 * _WIDTH * 72, 0.85 * _HEIGHT * 72)
    for (x, y), name, box in zip(anchors, names, label_places(anchors, sizes, frame), strict=True):
        left, bottom, right, top = box
        axes.annotate(
            name,
            (x, y),
            xytext=((left + right) / 2, (bottom + top) / 2),
            xycoords="figure points",
            textcoords="figure points",
            ha="center",
            va="center",
            fontsize=_FONT,
            color=_INK,
            arrowprops={"arrowstyle": "-", "color": _FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4},
        )
    axes.set_xlabel(f"peak activation memory of a rank ({unit})", fontsize=_FONT, color=_INK)
    axes.set_ylabel("bubble (idle share of the time)", fontsize=_FONT, color=_INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}" if widest < 0.05 else f"{value:.0%}")
    axes.grid(color="#E8E8E8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=_FONT, colors=_INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    if reference is not None:
        functions = (partial(_times, factor=1 / reference), partial(_times, factor=reference))
        multiples = axes.secondary_xaxis("top", functions=functions)
        multiples.set_xlabel("multiple of 1F1B's memory", fontsize=_FONT, color=_INK)
        multiples.tick_params(labelsize=_FONT, colors=_INK, length=0)
    if title:
        figure.text(0.08, 0.985, title, va="top", fontsize=_FONT + 2, fontweight="bold", color=_INK)
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def label_places(
    anchors: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], frame: Box, marker: float = 5.0
) -> list[Box]:
    """Where labels go so that none covers another, nor a marker: as near to their own marker as is free.

    Args:
        anchors: the centres of the markers.
        sizes: width and height of each label, in the same unit.
        frame: what labels must stay within. If there is no room at all, a label goes where it overlaps least.
        marker: half the width of a marker.
    """
    taken: list[Box] = [(x - marker, y - marker, x + marker, y + marker) for x, y in anchors]
    placed: list[Box] = []
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
        box = min(candidates)[2]
        taken.append(box)
        placed.append(box)
    return placed


def _times(values: Any, factor: float) -> Any:
    """What matplotlib asks of an axis in another unit, of numbers and arrays alike."""
    return values * factor


def _overlap(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0
