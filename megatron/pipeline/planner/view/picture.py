"""Timelines as a picture: one panel each, one row per rank, on a shared time axis, so that schedules compare by eye."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.view.style import (
    COLOURS,
    INK,
    ink,
    lane_kinds,
    lanes,
    number,
    save,
    shade,
    start_of,
    typical_length,
    with_whole_braids,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

Profile: TypeAlias = Sequence[Sequence[tuple[float, float]]]
Intervals: TypeAlias = Sequence[Sequence[tuple[float, float]]]

_IDLE = "#F1F1F1"
_WAIT = "#BBA9C9"
_LINK = "#B3261E"
_WIDTH, _TITLE, _CURVE, _AXIS, _LEGEND, _SIDE, _GAP = 13.0, 0.34, 0.95, 0.42, 0.26, 0.62, 0.14  # inches
_ROW, _FLATTEST, _TALLEST_PANEL, _LABEL_PITCH = 0.3, 0.05, 9.0, 0.13  # inches
_LANES = 0.45  # by how much a row is taller that has copy lanes below its passes
_FONT, _HALF_FONT, _SMALLEST = 8.0, 6.5, 5.5  # points
_LETTERS_OF_LINE, _BESIDE_LABEL = 190, 5  # of the legend, and what a colour and the space around it take


def draw(
    timelines: Mapping[str, Timeline],
    path: str | Path,
    memory: Mapping[str, Profile] | None = None,
    unit: str = "",
    splits: Mapping[str, int] | None = None,
    memory_unit: str = "",
    waits: Mapping[str, Intervals] | None = None,
    slow: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Draw timelines, planned or measured, one under another.

    Lanes are thin and below the passes of their rank: copies to host memory and back, and what runs between replicas. A
    forward and a backward that run as one are two boxes of half the height, one above the other.

    Args:
        timelines: what to draw, by title. Each is shifted to start at 0.
        path: where the picture goes; its suffix, .png or .svg, is the format.
        memory: for some of the titles, the ``activation_profile`` of the timeline, drawn under its panel.
        unit: of time, for the axis, such as ``ms``.
        splits: for some of the titles, into how many slices each microbatch is cut.
        memory_unit: of the memory, such as ``MiB``.
        waits: for some of the titles, for each rank, from when to when it waited for messages; drawn as flat bars.
        slow: for some of the titles, ``Costs.slow``: links are drawn as lines between the rows of their ranks, slow ranks beside.

    Raises:
        ValueError: there is nothing to draw, or the suffix is another one.
        OSError: the file cannot be written.
    """
    # Imported here: matplotlib takes longer to import than everything else that ``mpipe`` does.
    from matplotlib.figure import Figure

    if not timelines:
        raise ValueError("nothing to draw: give at least one timeline")
    memory, waits = memory or {}, waits or {}
    rows = {title: _row(timeline) * len(timeline.ranks) for title, timeline in timelines.items()}
    longest = max(timeline.makespan for timeline in timelines.values()) or 1.0
    numbers = _Numbers(timelines, splits or {}, (_WIDTH - 1.5 * _SIDE) * 72 / longest)
    handles = _handles(list(timelines.values()), bool(waits))
    legend = _LEGEND * _lines(handles)
    total = legend + sum(_TITLE + height + _GAP for height in rows.values()) + len(memory) * (_CURVE + _GAP) + _AXIS
    figure = Figure(figsize=(_WIDTH, total), facecolor="white")
    peak = max((held for profile in memory.values() for steps in profile for _, held in steps), default=0.0)
    top = total - legend
    axes: list[Axes] = []

    def add(height: float) -> Axes:
        box = (_SIDE / _WIDTH, (top - height) / total, 1 - 1.5 * _SIDE / _WIDTH, height / total)
        axes.append(figure.add_axes(box, xlim=(0, longest)))
        return axes[-1]

    for title, timeline in timelines.items():
        top -= _TITLE
        _panel(add(rows[title]), title, timeline, numbers, waits.get(title, ()), unit)
        _mark_slow(axes[-1], (slow or {}).get(title, {}), timeline)
        top -= rows[title] + _GAP
        if title in memory:
            _curve(add(_CURVE), memory[title], start_of(timeline), peak, memory_unit, named=title == next(iter(memory)))
            top -= _CURVE + _GAP
    for axis in axes[:-1]:
        axis.tick_params(labelbottom=False, bottom=False)
    axes[-1].set_xlabel(f"time ({unit or 'in the unit of the costs'})", fontsize=_FONT, color=INK, labelpad=2)
    _legend(figure, handles, total)
    save(figure, path)


class _Numbers:
    """The microbatch numbers in the boxes: one size for the whole picture, the largest at which they fit.

    Attributes:
        points: how many points on paper one unit of time takes.
        size: of the font, in points.
    """

    def __init__(self, timelines: Mapping[str, Timeline], splits: Mapping[str, int], points: float) -> None:
        self.points = points
        self._splits = splits
        self._letters = max(
            (len(self.text(title, timed)) for title, timeline in timelines.items() for rank in timeline.ranks for timed in rank),
            default=1,
        )
        self._height = min(_row(timeline) / (1 + _LANES * bool(timeline.copies)) for timeline in timelines.values()) * 72 * 0.72
        self.size = min(_FONT, self._height, max(_SMALLEST, self._largest(typical_length(timelines.values()))))

    def text(self, title: str, timed: Timed) -> str:
        return number(timed.work, self._splits.get(title, 1))

    def fits(self, length: float) -> bool:
        """Tell whether every number would fit into a box of that length in time, so that like boxes look alike."""
        return self._height >= _SMALLEST and self._largest(length) > self.size - 0.1

    def _largest(self, length: float) -> float:
        return (length * self.points - 2) / (0.64 * self._letters)


def _row(timeline: Timeline) -> float:
    """The height of a rank's row, in inches: flatter where there are many ranks."""
    return min(_ROW, max(_FLATTEST, _TALLEST_PANEL / len(timeline.ranks))) * (1 + _LANES if timeline.copies else 1)


def _bars(timeline: Timeline) -> dict[Kind | None, tuple[float, float]]:
    """From where to where in a row, which counts 1 from -0.5 to 0.5, its passes (None) and its lanes stand."""
    if not timeline.copies:
        return {None: (-0.42, 0.42)}
    kinds = lane_kinds(timeline)
    order = list(dict.fromkeys(kind.row.lane for kind in kinds))
    pitch = 0.3 / len(order)
    tops = {kind: 0.18 + pitch * order.index(kind.row.lane) for kind in kinds}
    return {None: (-0.46, 0.14)} | {kind: (top, top + 0.8 * pitch) for kind, top in tops.items()}


def _panel(axes: Axes, title: str, timeline: Timeline, numbers: _Numbers, waits: Intervals, unit: str) -> None:
    """One row per rank; grey is idle time between the first pass of any rank and the last."""
    ranks = len(timeline.ranks)
    _boxes(axes, title, timeline, numbers, waits)
    axes.set_ylim(ranks - 0.5, -0.5)
    every = 2 ** max(0, math.ceil(math.log2(_LABEL_PITCH / _row(timeline))))
    axes.set_yticks(range(0, ranks, every), [f"rank {rank}" for rank in range(0, ranks, every)])
    _plain(axes)
    axes.text(0, 1.0, title, transform=axes.transAxes, va="bottom", fontsize=_FONT + 3, fontweight="bold", color=INK)
    axes.text(1, 1.0, _summary(timeline, unit), transform=axes.transAxes, va="bottom", ha="right", fontsize=_FONT + 1, color=INK)


def _mark_slow(axes: Axes, slow: Mapping[str, float], timeline: Timeline) -> None:
    """Lines between the rows of ranks whose link has a time of its own, and beside a rank that is slow; which is said at the
    left where rows are not too flat, and at the right."""
    found: dict[int, list[str]] = {}  # by the row above
    for name, value in slow.items():
        ends = sorted(map(int, name.removeprefix("rank ").replace("to", "-").split("-")))
        if len(ends) == 1:
            text = axes.text(1.003, ends[0], f"{value:.3g}x", va="center", fontsize=_HALF_FONT, fontweight="bold", color=_LINK)
            text.set_transform(axes.get_yaxis_transform())
            continue
        found.setdefault(ends[ends[1] - ends[0] > 1], []).append(f"{name}: {value:.3g}")
    for above, words in found.items():
        axes.plot([0, timeline.makespan], [above + 0.5] * 2, color=_LINK, linestyle="--", clip_on=False)
        if _row(timeline) >= _ROW / 2:
            text = axes.text(-0.004, above + 0.5, "\n".join(words), ha="right", va="center", fontsize=_HALF_FONT, color=_LINK)
            text.set_transform(axes.get_yaxis_transform())


def _boxes(axes: Axes, title: str, timeline: Timeline, numbers: _Numbers, waits: Intervals) -> None:
    origin, chunks, bars = start_of(timeline), _chunks([timeline]), _bars(timeline)
    for row, rank in enumerate(timeline.ranks):
        low, high = (row + edge for edge in bars[None])
        for top, bottom in bars.values():
            axes.broken_barh([(0, timeline.makespan)], (row + top, bottom - top), facecolor=_IDLE, linewidth=0)
        if waits:
            intervals = [(start - origin, end - start) for start, end in waits[row]]
            axes.broken_barh(intervals, ((low + high) / 2 - 0.12, 0.24), facecolor=_WAIT, linewidth=0)
        passes = [timed for timed in rank if not timed.work.kind.is_copy]
        for kind, copies in lanes(timeline, row).items():
            _paths(axes, copies, (row + bars[kind][0], row + bars[kind][1]), origin, chunks, numbers)
        for (top, bottom), boxes in _halved(passes, low, high).items():
            _paths(axes, boxes, (top, bottom), origin, chunks, numbers)
            size = numbers.size if (top, bottom) == (low, high) else min(numbers.size, _HALF_FONT)
            for timed in boxes:
                if numbers.fits(timed.end - timed.start):
                    middle = (timed.start + timed.end) / 2 - origin
                    text, colour = numbers.text(title, timed), ink(shade(COLOURS[timed.work.kind], timed.work.chunk, chunks))
                    axes.text(middle, (top + bottom) / 2, text, ha="center", va="center_baseline", fontsize=size, color=colour)


def _halved(passes: Sequence[Timed], low: float, high: float) -> dict[tuple[float, float], list[Timed]]:
    """Boxes by from where to where in a row they stand: those of a braid one above the other."""
    middle = (low + high) / 2
    bars = {None: (low, high), 0: (low, middle), 1: (middle, high)}
    found: dict[tuple[float, float], list[Timed]] = {}
    for timed, half in with_whole_braids(passes):
        found.setdefault(bars[half], []).append(timed)
    return found


def _paths(axes: Axes, passes: Sequence[Timed], bar: tuple[float, float], origin: float, chunks: int, numbers: _Numbers) -> None:
    """Boxes of the height of a bar. All alike ones are one path: a fraction of the time and of the file."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    outline = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    low, high = bar
    alike: dict[tuple[Kind, int], list[Timed]] = {}
    for timed in passes:
        alike.setdefault((timed.work.kind, timed.work.chunk), []).append(timed)
    for (kind, chunk), same in alike.items():
        spans = [(float(start - origin), float(end - origin)) for _, start, end in same]
        narrow = min(end - start for start, end in spans) * numbers.points < 3
        corners = [
            corner for start, end in spans for corner in ((start, low), (end, low), (end, high), (start, high), (start, low))
        ]
        axes.add_patch(
            PathPatch(
                Outline(corners, outline * len(spans)),
                facecolor=shade(COLOURS[kind], chunk, chunks),
                edgecolor="white",
                linewidth=0 if narrow else 0.6,
            )
        )


def _curve(axes: Axes, profile: Profile, origin: float, peak: float, unit: str, named: bool) -> None:
    """Activation memory over time, one line per rank, from the first rank (dark) to the last (light).

    All curves of a picture share the scale up to ``peak``; the axis names the peak of this one.

    Args:
        named: whether the ranks are named.
    """
    from matplotlib import colormaps

    colours = colormaps["viridis"]
    top = max((held for steps in profile for _, held in steps), default=0.0)
    for rank, steps in enumerate(profile):
        times, held = zip(*((time - origin, level) for time, level in steps), strict=True)
        colour = colours(0.9 * rank / max(1, len(profile) - 1))
        axes.step(times, held, where="post", color=colour, linewidth=1.2, label=f"rank {rank}")
    axes.set_ylim(0, peak * 1.25 or 1)
    axes.set_yticks([0, top], ["0", f"{top:.4g}"])
    # Above all curves, where no number stands, however long.
    words = f"memory ({unit})" if unit else "memory"
    axes.text(0, 0.98, words, transform=axes.transAxes, va="top", fontsize=_FONT - 1, color=INK)
    if named and len(profile) <= 8:
        axes.legend(ncols=len(profile), loc="upper right", fontsize=_FONT - 1, frameon=False, handlelength=1.2, borderaxespad=0.1)
    elif named:
        note = f"from rank 0 (dark) to rank {len(profile) - 1} (light)"
        axes.text(1, 0.98, note, transform=axes.transAxes, ha="right", va="top", fontsize=_FONT - 1, color=INK)
    _plain(axes)


def _handles(timelines: Sequence[Timeline], waits: bool) -> list[Patch]:
    """Entries of the legend: the kinds of passes that occur, and how chunks are shaded."""
    from matplotlib.patches import Patch

    chunks = _chunks(timelines)
    kinds = {timed.work.kind for each in timelines for rank in (*each.ranks, *each.copies) for timed in rank}
    handles = [Patch(facecolor=COLOURS[kind], label=f"{kind}  {kind.row.meaning}") for kind in COLOURS if kind in kinds]
    shown = range(chunks) if chunks <= 4 else (0, chunks - 1)
    handles += [Patch(facecolor=shade("#777777", chunk, chunks), label=f"chunk {chunk}") for chunk in shown if chunks > 1]
    handles.append(Patch(facecolor=_IDLE, label="idle"))
    if waits:
        handles.append(Patch(facecolor=_WAIT, label="waits for a message"))
    return handles


def _lines(handles: Sequence[Patch]) -> int:
    return math.ceil(sum(len(str(handle.get_label())) + _BESIDE_LABEL for handle in handles) / _LETTERS_OF_LINE)


def _legend(figure: Figure, handles: Sequence[Patch], total: float) -> None:
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(_SIDE / _WIDTH, 1 - 0.06 / total),
        borderaxespad=0,
        borderpad=0,
        ncols=math.ceil(len(handles) / _lines(handles)),
        fontsize=_FONT,
        frameon=False,
        handlelength=1.2,
        columnspacing=1.6,
    )


def _plain(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, labelsize=_FONT, colors=INK)


def _chunks(timelines: Iterable[Timeline]) -> int:
    return 1 + max((timed.work.chunk for timeline in timelines for rank in timeline.ranks for timed in rank), default=0)


def _summary(timeline: Timeline, unit: str) -> str:
    def lengths(name: str, length: float, bubble: float) -> str:
        return f"{name} {f'{length:.4g} {unit}'.rstrip()}, bubble {bubble:.1%}"

    text = lengths("span", timeline.span, timeline.span_bubble_rate)
    if timeline.makespan > timeline.span * 1.0005:
        text += f"   ({lengths('makespan', timeline.makespan, timeline.bubble_rate)})"
    return text
