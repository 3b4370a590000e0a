"""What a search over trainings has found, as a picture: tokens per second against the memory of the fullest GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.pipeline.view.pareto import label_places

_INK, _FAINT = "#222222", "#8A8A8A"
_WIDTH, _HEIGHT, _FONT = 9.6, 5.6, 9.0  # inches, inches, points
_FRAME = (0.09, 0.11, 0.88, 0.76)


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
        groups: trainings by what they have in common; the names of the first one's front are shown.
        path: where the picture goes; its suffix, .png or .svg, is the format.
        memory: GiB of a GPU.

    Raises:
        ValueError: there is nothing to draw.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    everything = [training for group in groups.values() for training in group]
    if not everything:
        raise ValueError("nothing to draw: give at least one training")
    figure = Figure(figsize=(_WIDTH, _HEIGHT), facecolor="white", dpi=160)
    axes = figure.add_axes(_FRAME)
    axes.set_xlim(0, memory * 1.03)
    axes.set_ylim(0, 1.12 * max(training.tokens_per_second for training in everything))
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
            marker="o",
            markersize=6,
            label=name,
        )
    named = front(next(iter(groups.values())))
    anchors = [tuple(axes.transData.transform((one.memory, one.tokens_per_second)) * 72 / figure.dpi) for one in named]
    sizes = [(0.56 * _FONT * len(one.name), 1.25 * _FONT) for one in named]
    left, bottom, wide, high = _FRAME
    frame = (left * _WIDTH * 72, bottom * _HEIGHT * 72, (left + wide) * _WIDTH * 72, (bottom + high) * _HEIGHT * 72)
    for (x, y), one, box in zip(anchors, named, label_places(anchors, sizes, frame), strict=True):
        axes.annotate(
            one.name,
            (x, y),
            xytext=((box[0] + box[2]) / 2, (box[1] + box[3]) / 2),
            xycoords="figure points",
            textcoords="figure points",
            ha="center",
            va="center",
            fontsize=_FONT - 1,
            color=_INK,
            arrowprops={"arrowstyle": "-", "color": _FAINT, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4},
        )
    axes.set_xlabel("GiB of the fullest GPU", fontsize=_FONT, color=_INK)
    axes.set_ylabel("tokens per second", fontsize=_FONT, color=_INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(color="#E8E8E8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=_FONT, colors=_INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=_FONT, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    if title:
        figure.text(0.09, 0.985, title, va="top", fontsize=_FONT + 2, fontweight="bold", color=_INK)
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)
