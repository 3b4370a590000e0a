"""What a search over trainings has found, as a picture: tokens per second against the memory of the fullest GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_INK = "#222222"
_WIDTH, _HEIGHT, _FONT = 9.6, 5.0, 9.0  # inches, inches, points
_LEFT, _LINE = 0.09, 0.19  # of the width; inches


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
        memory: GiB of a GPU.

    Raises:
        ValueError: there is nothing to draw.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    if not all(groups.values()):
        raise ValueError("nothing to draw: give at least one training of each group")
    below = _LINE * len(front(next(iter(groups.values())))) + 0.8  # inches, for what the numbers stand for
    high = _HEIGHT + below
    figure = Figure(figsize=(_WIDTH, high), facecolor="white", dpi=160)
    axes = figure.add_axes((_LEFT, below / high, 0.97 - _LEFT, (_HEIGHT - 0.75) / high))
    axes.set_xlim(0, memory * 1.03)
    fastest, slowest = (pick(one.tokens_per_second for group in groups.values() for one in front(group)) for pick in (max, min))
    margin = 0.15 * (fastest - slowest) + 0.02 * fastest
    axes.set_ylim(max(0.0, slowest - 2 * margin), fastest + margin)
    axes.axvline(memory, color=_INK, linewidth=1, linestyle=":")
    for (name, group), colour in zip(groups.items(), ("#D55E00", "#0072B2"), strict=False):
        best = front(group)
        axes.plot(
            [one.memory for one in group], [one.tokens_per_second for one in group], "o", color=colour, alpha=0.25, markersize=4
        )
        axes.step(
            [one.memory for one in best] + [memory],
            [one.tokens_per_second for one in best] + [best[-1].tokens_per_second],
            where="post",
            color=colour,
            linewidth=1.4,
            label=name,
        )
        axes.plot([one.memory for one in best], [one.tokens_per_second for one in best], "o", color=colour, markersize=6)
    named = front(next(iter(groups.values())))[::-1]
    for number, one in enumerate(named, 1):
        axes.annotate(
            str(number),
            (one.memory, one.tokens_per_second),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=_FONT,
            color=_INK,
        )
    lines = [f"{n}  {one.tokens_per_second:,.0f} tokens/s  {one.memory:.1f} GiB  {one.name}" for n, one in enumerate(named, 1)]
    figure.text(_LEFT, _LINE / 2 / high, "\n".join(lines), va="bottom", fontsize=_FONT, color=_INK, linespacing=1.4)
    axes.set_xlabel("GiB of the fullest GPU", fontsize=_FONT, color=_INK)
    axes.set_ylabel("tokens per second", fontsize=_FONT, color=_INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(color="#E8E8E8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=_FONT, colors=_INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=_FONT, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    if title:
        figure.text(_LEFT, 0.985, title.replace("$", r"\$"), va="top", fontsize=_FONT + 2, fontweight="bold", color=_INK)
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)
