"""The picture of docs/architecture.md: the rooms of the package in the order data flows, and the values that pass between them.

.venv/bin/python benchmarks/architecture.py docs/images/architecture.png
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

WIDTH, HEIGHT = 164.0, 81.0  # of the drawing, in units of its own
UNITS_PER_INCH = 11.7
COLUMNS = (15.0, 51.0, 83.0, 115.0, 147.0)  # where boxes have their middle
ROWS = (66.0, 39.0, 10.0)
BOX_WIDTH, BOX_HEIGHT = 21.0, 11.0
INK, QUIET, OBJECT = "#222222", "#555555", "#8A2C00"


class Room(NamedTuple):
    """A folder of the package: its words and where they begin, its colour, and its (left, bottom, right, top)."""

    name: str
    words: str
    words_at: tuple[float, float]
    colour: str
    place: tuple[float, float, float, float]


class Arrow(NamedTuple):
    """A value that passes from box to box: its name, where the name is drawn, and the points of the line."""

    name: str
    at: tuple[float, float]
    points: tuple[tuple[float, float], ...]


# Colours of passes (Okabe and Ito's palette), lightened.
ROOMS = (
    Room("flags/  session/", "trainer/, launch/: the loop", (4, 74.6), "#D6ECF8", (2, 2, 28, 79)),
    Room(
        "planning/  schedule/",
        "what runs when: without torch, before any process group exists",
        (66, 76.8),
        "#FBEBCC",
        (37, 58, 162, 79),
    ),
    Room(
        "runtime/",
        "and record/: how one rank runs its program, and what it measured; knows no family",
        (54, 51.8),
        "#CDEBE1",
        (37, 30, 162, 54),
    ),
    Room("megatron.core", "from pip; replaced only in patches/", (59, 20.8), "#E6E6E6", (37, 2, 97, 23)),
    Room("model/", "and backward/: what a pass computes", (124, 20.8), "#F6DCEB", (101, 2, 162, 23)),
)
# Files of rooms, by row and column; the first line of each is bold.
BOXES = (
    (
        "flags\nread and validated;\nor launch/run",
        "planning/\ncosts, limits,\nchoice of a schedule",
        "families/\none function each;\nthen transforms/",
        "rules/\nverify names the pass\nthat breaks a rule",
        "lower/\nsends, receives, waits;\nno deadlock",
    ),
    (
        "metrics, trace\nview/: pictures",
        "cost_profile, replan\nmeasures, plans again",
        "recorder, report\nwhat all ranks did",
        "executor\npasses, messages,\ncopies, collectives",
        "one iteration\nunder a plan that\npipeline keeps",
    ),
    (
        "loop, iterations\nor Megatron-LM's train",
        "optimizer, clipping\noptimizer/: step ahead",
        "DDP\nfinalize_model_grads",
        "backward/\nsplit linears, experts,\nweight tasks",
        "model/\nthe GPT of this rank,\ncut by the placement",
    ),
)


def _across(name: str, left: int, right: int, row: int, words: float = 1.9) -> Arrow:
    """An arrow between neighbouring boxes of a row, in either direction; its name is drawn above."""
    towards = 1 if right > left else -1
    (start, end), y = (COLUMNS[left] + towards * BOX_WIDTH / 2, COLUMNS[right] - towards * BOX_WIDTH / 2), ROWS[row]
    return Arrow(name, ((start + end) / 2, y + words), ((start, y), (end, y)))


def _down(name: str, column: int, above: int, words: float, shift: float = 0.0, up: bool = False) -> Arrow:
    """An arrow between a box and the one below it, down or up; its name is drawn `words` below the upper box."""
    x, ends = COLUMNS[column] + shift, (ROWS[above] - BOX_HEIGHT / 2, ROWS[above + 1] + BOX_HEIGHT / 2)
    start, end = reversed(ends) if up else ends
    return Arrow(name, (x, ends[0] - words), ((x, start), (x, end)))


ARROWS = (
    _across("flags,\nlimits", 0, 1, 0, words=2.8),
    _across("Problem", 1, 2, 0),
    _across("Schedule", 2, 3, 0),
    _across("Schedule", 3, 4, 0),
    _down("Plan: Schedule, Programs", 4, 0, words=4.5),
    _across("Program", 4, 3, 1),
    _across("Record", 3, 2, 1),
    _across("Report", 2, 1, 1),
    _down("measured Costs", 1, 0, words=4.5, up=True),
    Arrow(
        "Report",
        (32.5, 31.5),
        ((COLUMNS[2], ROWS[1] - 5.5), (COLUMNS[2], 31.5), (COLUMNS[0] + 6, 31.5), (COLUMNS[0] + 6, ROWS[1] - 5.5)),
    ),
    _down("Pass, tensors", 3, 1, words=2.0, shift=-3),
    _down("tensors", 3, 1, words=2.4, shift=6.5, up=True),
    _across("layers", 4, 3, 2),
    _across("main_grad", 3, 2, 2),
    _across("sums", 2, 1, 2),
    _across("norm,\nthe step", 1, 0, 2, words=2.8),
    _down("Step", 0, 1, words=9.0, shift=-5, up=True),
    Arrow(
        "microbatches: get_forward_backward_func()",
        (67, 26.5),
        ((COLUMNS[0] + 6, ROWS[2] + 5.5), (COLUMNS[0] + 6, 26.5), (COLUMNS[4], 26.5), (COLUMNS[4], ROWS[1] - 5.5)),
    ),
)


def draw(path: str) -> None:
    figure = Figure(figsize=(WIDTH / UNITS_PER_INCH, HEIGHT / UNITS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.axis("off")
    for room in ROOMS:
        left, bottom, right, top = room.place
        _rounded(axes, left, bottom, right - left, top - bottom, room.colour)
        axes.text(left + 2, top - 2, room.name, weight="bold", size=12, va="top", color=INK)
        axes.text(*room.words_at, room.words, size=9.5, va="top", color=QUIET)
    for y, texts in zip(ROWS, BOXES, strict=True):
        for x, text in zip(COLUMNS, texts, strict=True):
            _box(axes, x, y, text)
    for arrow in ARROWS:
        _arrow(axes, arrow)
    figure.savefig(path, dpi=120)


def _box(axes: Axes, x: float, y: float, text: str) -> None:
    _rounded(axes, x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT, "white")
    lines = text.split("\n")
    for number, line in enumerate(lines):
        weight, size = ("bold", 9.5) if number == 0 else ("normal", 8.5)
        axes.text(
            x, y + 1.4 * (len(lines) - 1) - 2.8 * number, line, weight=weight, size=size, ha="center", va="center", color=INK
        )


def _rounded(axes: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    shape = "round,pad=0,rounding_size=1"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=colour, edgecolor="#888888"))


def _arrow(axes: Axes, arrow: Arrow) -> None:
    line = Path(arrow.points)
    axes.add_patch(FancyArrowPatch(path=line, arrowstyle="-|>", mutation_scale=13, facecolor="none", edgecolor=INK))
    axes.add_patch(
        FancyArrowPatch(arrow.points[-2], arrow.points[-1], arrowstyle="-|>", mutation_scale=13, color=INK, shrinkA=0, shrinkB=0)
    )
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.9}
    x, y = arrow.at
    axes.text(x, y, arrow.name, size=8.5, style="italic", ha="center", va="center", color=OBJECT, bbox=paper)


if __name__ == "__main__":
    draw(sys.argv[1])
