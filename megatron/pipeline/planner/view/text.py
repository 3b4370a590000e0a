"""A timeline as plain text, for terminals."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from itertools import chain

from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.view.style import lanes, number, typical_length

# What fills a pass behind its name, so that its length shows.
_FILL = {
    **{Kind.F: "-", Kind.R: "+", Kind.B: "=", Kind.W: "~", Kind.BW: "=", Kind.FB: "=", Kind.FBW: "="},
    **{Kind.S: "s", Kind.T: "t", Kind.IF: ".", Kind.IB: ","},
}
_LETTERS = {Kind.D2H: ">", Kind.H2D: "<"}  # not written as they are called: lines of their own say which they are
_IDLE = "."
_CUT = " ... "
_MOST_COLUMNS = 1e9  # of a drawing before it is cut: keeps columns whole numbers for any times


def render(timeline: Timeline, width: int = 100, splits: int = 1) -> str:
    """One line per rank on one time axis; what does not fit into its width is left out, and said below.

    A pass is its kind and microbatch (``F0--``, ``B0==``, ``W0~~``, ``R0++``; with several chunks ``F0.1``, with slices
    ``F0a``), or, where the line is too short for that, the first letter of its kind. Dots are idle time. Copies to host memory
    (``>0--``) and back (``<0--``) are on two lines below those of their rank. Where the line is too short even for letters, the
    middle of the time is left out.

    Args:
        timeline: planned or measured.
        width: most characters of a line.
        splits: slices per microbatch, as the schedule has them.
    """
    computed = [[timed for timed in rank if not timed.work.kind.is_copy] for rank in timeline.ranks]
    passes = [timed for rank in (*computed, *timeline.copies) for timed in rank]
    margin = len(f"rank {len(timeline.ranks) - 1} ")
    origin = min((timed.start for timed in passes), default=0.0)
    room = max(10, width - margin)
    scale = _scale(timeline, room)
    columns = round(timeline.makespan * scale)
    chunked = any(timed.work.chunk for timed in passes)

    def name(timed: Timed) -> str:
        kind, chunk = _LETTERS.get(timed.work.kind, timed.work.kind), f".{timed.work.chunk}" if chunked else ""
        return f"{kind}{number(timed.work, splits)}{chunk}"

    def named(some: Iterable[Timed]) -> bool:
        return all(len(name(timed)) <= int((timed.end - timed.start) * scale) for timed in some)

    passes_named, copies_named = named(chain(*computed)), named(chain(*timeline.copies))
    windows = _windows(columns, room)

    def column(time: float) -> int:
        return round((time - origin) * scale)

    def row(label: str, some: Iterable[Timed], with_names: bool) -> str:
        """Passes between dots, as far as they are in the windows."""
        cells = [[_IDLE] * (stop - first) for first, stop in windows]
        for timed in some:
            begin, end = column(timed.start), column(timed.end)
            text = name(timed)[: None if with_names else 1].ljust(end - begin, _FILL.get(timed.work.kind, "-"))
            for (first, stop), seen in zip(windows, cells, strict=True):
                low, high = max(begin, first), min(end, stop)
                if low < high:
                    seen[low - first : high - first] = text[low - begin : high - begin]
        return label.ljust(margin) + _CUT.join(map("".join, cells))

    def rows(index: int) -> Iterator[str]:
        yield row(f"rank {index}", computed[index], passes_named)
        for kind, copies in lanes(timeline, index).items():
            yield row(f" {kind}", copies, copies_named)

    def shown(timed: Timed) -> bool:
        return any(max(column(timed.start), first) < min(column(timed.end), stop) for first, stop in windows)

    lines = [text for index in range(len(timeline.ranks)) for text in rows(index)]
    seen = sum(map(shown, passes))
    if columns > room or seen < sum(timed.start < timed.end for timed in passes):
        reason = "passes too short for a column"
        if columns > room:
            reason = f"time {windows[0][1] / scale:.4g} to {windows[1][0] / scale:.4g} of {timeline.makespan:.4g}"
        note = f"left out: {reason}; {len(passes) - seen:,} of {len(passes):,} passes"
        lines += textwrap.wrap(note, max(20, width))
    return "\n".join(lines)


def _windows(columns: int, room: int) -> list[tuple[int, int]]:
    """Columns that are shown, from the first to before the last of two numbers: all, or those at the start and at the end."""
    if columns <= room:
        return [(0, columns)]
    head = (room - len(_CUT) + 1) // 2
    return [(0, head), (columns - (room - len(_CUT) - head), columns)]


def _scale(timeline: Timeline, room: int) -> float:
    """Columns per unit of time: whole columns for the shortest pass keep passes of equal length equally long.

    If the shortest pass would have none, the same for the typical one; that has at least one, if need be in more columns
    than there is room for.
    """
    makespan = timeline.makespan
    if makespan < 1e-300:  # shorter times have no finite inverse
        return 0.0
    lengths = [end - start for rank in timeline.ranks for _, start, end in rank if end > start]
    shortest, typical = min(lengths, default=makespan), typical_length([timeline])
    if shortest * room >= makespan:
        return int(shortest * room / makespan) / shortest
    if typical * room >= makespan:
        return int(typical * room / makespan) / typical
    return 1 / typical if typical * _MOST_COLUMNS > makespan else _MOST_COLUMNS / makespan
