"""Timelines as a picture: one panel each, one row per rank, on a shared time axis, so that schedules compare by eye."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from megatron.pipeline.schedule.passes import Kind
from megatron.pipeline.schedule.timeline import Timed, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Profile: TypeAlias = Sequence[Sequence[tuple[float, float]]]

# Okabe and Ito's palette: told apart with every kind of colour blindness, and in grey by their lightness.
_COLOURS = {Kind.F: "#56B4E9", Kind.B: "#E69F00", Kind.W: "#009E73", Kind.BW: "#D55E00"}
_MEANING = {Kind.F: "forward", Kind.B: "backward, input", Kind.W: "backward, weights", Kind.BW: "backward, fused"}
_IDLE = "#F1F1F1"
_INK = "#222222"
_WIDTH, _ROW, _TITLE, _CURVE, _AXIS, _LEGEND, _SIDE, _GAP = 13.0, 0.3, 0.34, 0.95, 0.42, 0.26, 0.62, 0.14  # inches
_FONT, _SMALLEST = 8.0, 5.5  # points


def draw(
    timelines: Mapping[str, Timeline],
    path: str | Path,
    memory: Mapping[str, Profile] | None = None,
    unit: str = "",
) -> None:
    """Draw timelines, planned or measured, one under another.

    Args:
        timelines: what to draw, by title. Each is shifted to start at 0.
        path: where the picture goes; its suffix, .png or .svg, is the format.
        memory: for some of the titles, the ``activation_profile`` of the timeline, drawn under its panel.
        unit: of time, for the axis, such as ``ms``.

    Raises:
        ValueError: there is nothing to draw, or the suffix is another one.
        OSError: the file cannot be written.
    """
    # Imported here: matplotlib takes longer to import than everything else that ``mpipe`` does.
    from matplotlib.figure import Figure

    if not timelines:
        raise ValueError("nothing to draw: give at least one timeline")
    if Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"cannot draw {path}: the file name must end in .png or .svg")
    memory = memory or {}
    heights = [
        height
        for title, timeline in timelines.items()
        for height in [_TITLE + _ROW * len(timeline.ranks) + _GAP, *([_CURVE + _GAP] if title in memory else [])]
    ]
    total = _LEGEND + sum(heights) + _AXIS
    longest = max(timeline.makespan for timeline in timelines.values()) or 1.0
    numbers = _Numbers(timelines.values(), (_WIDTH - 1.5 * _SIDE) * 72 / longest)
    figure = Figure(figsize=(_WIDTH, total), facecolor="white")
    peak = max((held for profile in memory.values() for steps in profile for _, held in steps), default=0.0)
    top = total - _LEGEND
    axes: list[Axes] = []

    def add(height: float) -> Axes:
        box = (_SIDE / _WIDTH, (top - height) / total, 1 - 1.5 * _SIDE / _WIDTH, height / total)
        axes.append(figure.add_axes(box, xlim=(0, longest)))
        return axes[-1]

    for title, timeline in timelines.items():
        top -= _TITLE
        rows = _ROW * len(timeline.ranks)
        _panel(add(rows), title, timeline, numbers)
        top -= rows + _GAP
        if title in memory:
            _curve(add(_CURVE), memory[title], _origin(timeline), peak)
            top -= _CURVE + _GAP
    for axis in axes[:-1]:
        axis.tick_params(labelbottom=False, bottom=False)
    axes[-1].set_xlabel(f"time ({unit})" if unit else "time", fontsize=_FONT, color=_INK, labelpad=2)
    _legend(figure, timelines.values(), total)
    figure.savefig(path, dpi=160, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


class _Numbers:
    """The microbatch numbers in the boxes: one size for the whole picture, the largest at which they fit.

    Attributes:
        points: how many points on paper one unit of time takes.
        size: of the font, in points.
    """

    def __init__(self, timelines: Iterable[Timeline], points: float) -> None:
        passes = [timed for timeline in timelines for rank in timeline.ranks for timed in rank]
        self.points = points
        self._digits = len(str(max((timed.work.microbatch for timed in passes), default=0)))
        lengths = sorted(end - start for _, start, end in passes)
        # Measured passes vary: the shortest tenth may go without a number rather than make all others small.
        typical = self._largest(lengths[len(lengths) // 10]) if lengths else _FONT
        self.size = min(_FONT, max(_SMALLEST, typical))

    def fits(self, length: float) -> bool:
        """Whether every number would fit into a box of that length in time, so that like boxes look alike."""
        return self._largest(length) > self.size - 0.1

    def _largest(self, length: float) -> float:
        return (length * self.points - 2) / (0.64 * self._digits)


def _panel(axes: Axes, title: str, timeline: Timeline, numbers: _Numbers) -> None:
    """One box per pass; grey is idle time between the first pass of any rank and the last."""
    origin, ranks = _origin(timeline), len(timeline.ranks)
    chunks = 1 + max((timed.work.chunk for rank in timeline.ranks for timed in rank), default=0)
    for row, rank in enumerate(timeline.ranks):
        axes.broken_barh([(0, timeline.makespan)], (row - 0.42, 0.84), facecolor=_IDLE, linewidth=0)
        boxes: dict[tuple[Kind, int], list[Timed]] = {}
        for timed in rank:
            boxes.setdefault((timed.work.kind, timed.work.chunk), []).append(timed)
        for (kind, chunk), alike in boxes.items():
            spans = [(start - origin, end - start) for _, start, end in alike]
            narrow = min(length for _, length in spans) * numbers.points < 3
            colour = _shade(_COLOURS[kind], chunk, chunks)
            axes.broken_barh(spans, (row - 0.42, 0.84), facecolor=colour, edgecolor="white", linewidth=0 if narrow else 0.6)
        for work, start, end in rank:
            if numbers.fits(end - start):
                middle = (start + end) / 2 - origin
                axes.text(
                    middle,
                    row,
                    str(work.microbatch),
                    ha="center",
                    va="center_baseline",
                    fontsize=numbers.size,
                    color=_INK,
                )
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    _plain(axes)
    axes.text(0, 1.0, title, transform=axes.transAxes, va="bottom", fontsize=_FONT + 3, fontweight="bold", color=_INK)
    axes.text(1, 1.0, _summary(timeline), transform=axes.transAxes, va="bottom", ha="right", fontsize=_FONT + 1, color=_INK)


def _curve(axes: Axes, profile: Profile, origin: float, peak: float) -> None:
    """Activation memory over time, one line per rank, from the first rank (dark) to the last (light).

    All curves of a picture share the scale up to ``peak``; the axis names the peak of this one.
    """
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    top = max((held for steps in profile for _, held in steps), default=0.0)
    for rank, steps in enumerate(profile):
        times = [time - origin for time, _ in steps]
        held = [level for _, level in steps]
        colour = colours(0.9 * rank / max(1, len(profile) - 1))
        axes.step(times, held, where="post", color=colour, linewidth=1.2, label=f"rank {rank}")
    axes.set_ylim(0, peak * 1.25 or 1)
    axes.set_yticks([0, top], ["0", f"{top:g}"])
    axes.set_ylabel("memory", fontsize=_FONT, color=_INK)
    if len(profile) <= 8:
        axes.legend(
            ncols=len(profile),
            loc="upper right",
            fontsize=_FONT - 1,
            frameon=False,
            handlelength=1.2,
            borderaxespad=0.1,
        )
    _plain(axes)


def _legend(figure: Figure, timelines: Iterable[Timeline], total: float) -> None:
    """The kinds of passes that occur, and how chunks are shaded, once for the whole picture."""
    from matplotlib.patches import Patch

    works = {timed.work for timeline in timelines for rank in timeline.ranks for timed in rank}
    chunks = 1 + max((work.chunk for work in works), default=0)
    kinds = {work.kind for work in works}
    handles = [Patch(facecolor=_COLOURS[kind], label=f"{kind}  {meaning}") for kind, meaning in _MEANING.items() if kind in kinds]
    handles += [
        Patch(facecolor=_shade("#777777", chunk, chunks), label=f"chunk {chunk}") for chunk in range(chunks) if chunks > 1
    ]
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(_SIDE / _WIDTH, 1 - 0.06 / total),
        borderaxespad=0,
        borderpad=0,
        ncols=len(handles),
        fontsize=_FONT,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.6,
    )


def _plain(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelsize=_FONT, colors=_INK)


def _shade(colour: str, chunk: int, chunks: int) -> str:
    """The colour itself for chunk 0, lighter for every further chunk."""
    white = 0.55 * chunk / max(1, chunks - 1)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02X}" for part in parts)


def _summary(timeline: Timeline) -> str:
    text = f"span {timeline.span:.4g}, bubble {timeline.bubble_rate:.1%}"
    if timeline.makespan > timeline.span * 1.0005:
        text += f"   (makespan {timeline.makespan:.4g}, bubble {timeline.makespan_bubble_rate:.1%})"
    return text


def _origin(timeline: Timeline) -> float:
    return min((rank[0].start for rank in timeline.ranks if rank), default=0.0)
