"""What a search over trainings has found, as a picture: tokens per second against the memory of the fullest GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_INK, _GREY = "#222222", "#666666"
_COLOURS = ("#D55E00", "#0072B2")
_WIDTH, _HEIGHT, _FONT = 9.6, 5.0, 9.0  # inches, inches, points
_LEFT, _LINE = 0.09, 0.19  # of the width; inches
_AWAY = 9.0  # points from a training to its number
_EXPLAINED = (
    "Large dots: the fastest in that much memory. Small dots: other trainings that were planned. Dotted: what a GPU may take."
)


class Training(NamedTuple):
    """One training: what it is called, tokens per second, and GiB of its fullest GPU."""

    name: str
    tokens_per_second: float
    memory: float


def front(trainings: Sequence[Training]) -> list[Training]:
    """Those that no other beats, neither faster in the same memory nor in less memory as fast, by memory."""
    best: list[Training] = []
    for training in sorted(trainings, key=lambda one: (one.memory, -one.tokens_per_second)):
        if not best or training.tokens_per_second > best[-1].tokens_per_second:
            best.append(training)
    return best


def draw_front(groups: Mapping[str, Sequence[Training]], path: str | Path, memory: float, title: str = "") -> None:
    """Draw trainings, and the front of each group: the most tokens per second in every amount of memory.

    Args:
        groups: trainings by what they have in common; the first one's front is numbered, and its names stand below.
        path: where the picture goes; its suffix, .png or .svg, is the format.
        memory: GiB that a training may take of a GPU.

    Raises:
        ValueError: there is nothing to draw.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    if not all(groups.values()):
        raise ValueError("nothing to draw: give at least one training of each group")
    fronts = {name: front(group) for name, group in groups.items()}
    named = next(iter(fronts.values()))[::-1]
    below = _LINE * len(named) + 0.8  # inches, for what the numbers stand for
    high = _HEIGHT + below
    figure = Figure(figsize=(_WIDTH, high), facecolor="white", dpi=160)
    axes = figure.add_axes((_LEFT, below / high, 0.97 - _LEFT, (_HEIGHT - 0.95) / high))
    _limits(axes, [one for best in fronts.values() for one in best], memory)
    axes.axvline(memory, color=_INK, linewidth=1, linestyle=":")
    for (name, group), colour in zip(groups.items(), _COLOURS, strict=False):
        best = fronts[name]
        axes.plot(
            [one.memory for one in group], [one.tokens_per_second for one in group], "o", color=colour, alpha=0.25, markersize=4
        )
        axes.step(
            [one.memory for one in best] + [memory],
            [one.tokens_per_second for one in best] + [best[-1].tokens_per_second],
            where="post",
            color=colour,
            linewidth=1.4,
        )
        axes.plot(
            [one.memory for one in best],
            [one.tokens_per_second for one in best],
            "o-",
            color=colour,
            lw=0,
            markersize=6,
            label=name,
        )
    _number(axes, named)
    lines = [f"{n}  {one.tokens_per_second:,.0f} tokens/s  {one.memory:.1f} GiB  {one.name}" for n, one in enumerate(named, 1)]
    figure.text(_LEFT, _LINE / 2 / high, "\n".join(lines), va="bottom", fontsize=_FONT, color=_INK, linespacing=1.4)
    axes.set_xlabel("GiB of the fullest GPU", fontsize=_FONT, color=_INK)
    axes.set_ylabel("tokens per second", fontsize=_FONT, color=_INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(color="#E8E8E8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=_FONT, colors=_INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=_FONT, frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, handletextpad=0.2)
    if title:
        figure.text(_LEFT, 1 - 0.1 / high, title.replace("$", r"\$"), va="top", fontsize=_FONT + 2, fontweight="bold", color=_INK)
    figure.text(_LEFT, 1 - 0.36 / high, _EXPLAINED, va="top", fontsize=_FONT, color=_GREY)
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def _limits(axes: Any, best: Sequence[Training], memory: float) -> None:
    """Show what is around the fronts: what is far below, in tokens or in memory, would leave most of the picture empty."""
    speeds = [one.tokens_per_second for one in best]
    margin = 0.15 * (max(speeds) - min(speeds)) + 0.02 * max(speeds)
    axes.set_ylim(max(0.0, min(speeds) - 2 * margin), max(speeds) + margin)
    least = min(one.memory for one in best)
    aside = 0.06 * (memory - least) + 0.01 * memory
    axes.set_xlim(max(0.0, least - 1.5 * aside), memory + aside)


def _number(axes: Any, named: Sequence[Training]) -> None:
    """Number trainings of a front, above and to the left of them, where nothing else of the front is, none on another."""
    taken: list[tuple[float, float]] = []
    scale = axes.figure.dpi / 72  # pixels a point
    for number, one in sorted(enumerate(named, 1), key=lambda pair: pair[1].memory):
        x, y = axes.transData.transform((one.memory, one.tokens_per_second)) / scale
        right, up = x - _AWAY / 2, y + _AWAY / 2
        while any(abs(right - other) < 2 * _FONT and abs(up - height) < 1.2 * _FONT for other, height in taken):
            up += 2.0
        taken.append((right, up))
        axes.annotate(
            str(number),
            (one.memory, one.tokens_per_second),
            xytext=(right - x, up - y),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=_FONT,
            color=_INK,
            arrowprops={"arrowstyle": "-", "color": _GREY, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 3}
            if up - y > _AWAY
            else None,
        )
