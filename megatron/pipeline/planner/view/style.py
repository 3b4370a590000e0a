"""Style of every kind of picture: the colours of passes, their shading by chunk, and how a microbatch is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct with every kind of colour blindness, and in grey by their lightness.
COLOURS = {
    Kind.F: "#56B4E9",
    Kind.R: "#CC79A7",
    Kind.B: "#E69F00",
    Kind.W: "#009E73",
    Kind.BW: "#D55E00",
    # Darker than B and BW: braided with the forward before them.
    Kind.FB: "#B27A00",
    Kind.FBW: "#943F00",
    # Of the same palette, its yellow and its blue, and their neighbours.
    Kind.S: "#F0E442",
    Kind.T: "#0072B2",
    Kind.IF: "#999999",
    Kind.IB: "#666666",
    # Paul Tol's wine and indigo: dark, on lanes of their own.
    Kind.D2H: "#882255",
    Kind.H2D: "#332288",
    # Of the same palette, what runs once an iteration.
    Kind.RS: "#AA4499",
    Kind.OPT: "#DDCC77",
    Kind.AG: "#117733",
}
INK = "#222222"
LIGHTEST = 0.55  # how far the last chunk's colour is on the way to white


def save(figure: Figure, path: str | Path) -> None:
    """Write a picture whose bytes depend on nothing but what it shows.

    Raises:
        ValueError: the suffix of the path is none of .png, .svg and .pdf.
        OSError: the file cannot be written.
    """
    dates = {".png": None, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    if Path(path).suffix not in dates:
        raise ValueError(f"cannot draw {path}: the file name must end in .png, .svg or .pdf")
    figure.savefig(path, dpi=160, metadata=dates[Path(path).suffix])


def shade(colour: str, chunk: int, chunks: int) -> str:
    """The colour itself for chunk 0, lighter for every further chunk."""
    white = LIGHTEST * chunk / max(1, chunks - 1)
    return "#" + "".join(f"{round(part + (255 - part) * white):02X}" for part in rgb(colour))


def rgb(colour: str) -> tuple[int, ...]:
    """Red, green and blue, each of 0 to 255."""
    return tuple(bytes.fromhex(colour[1:]))


def ink(colour: str) -> str:
    """Legible ink on a colour: white where it is dark (WCAG's relative luminance below 0.18), nearly black elsewhere."""
    parts = (part / 255 for part in rgb(colour))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#FFFFFF" if luminance < 0.18 else INK


def number(work: Pass, splits: int = 1) -> str:
    """The microbatch of a pass, and the letter of its slice where each microbatch is cut into several: ``3``, ``3a``."""
    if splits == 1:
        return str(work.microbatch)
    microbatch, slice_ = divmod(work.microbatch, splits)
    letters = ""
    while slice_ >= 0:  # a .. z, aa .. az, ba ..
        slice_, letter = divmod(slice_, 26)
        letters = chr(ord("a") + letter) + letters
        slice_ -= 1
    return f"{microbatch}{letters}"


def lane_kinds(timeline: Timeline) -> list[Kind]:
    """The kinds of passes on lanes that a timeline has, each of which is drawn as a lane; of copies both directions."""
    present = {timed.work.kind for row in timeline.copies for timed in row}
    copies = any(kind.is_copy for kind in present) or not present
    return [kind for kind in COLOURS if kind in present or (kind.is_copy and copies)] if timeline.copies else []


def lanes(timeline: Timeline, rank: int) -> dict[Kind, list[Timed]]:
    """A rank's passes on lanes by their kind; empty where the timeline has none of any rank."""
    return {kind: [timed for timed in timeline.copies[rank] if timed.work.kind is kind] for kind in lane_kinds(timeline)}


def with_whole_braids(passes: Sequence[Timed]) -> Iterator[tuple[Timed, int | None]]:
    """The passes of a rank, both halves of a braid (0 and 1) for all of its time; None for a pass alone."""
    for before, timed, after in zip([None, *passes], passes, [*passes[1:], None], strict=False):
        if after and after.work.kind.row.braided:
            yield timed._replace(end=after.end), 0
        elif before and timed.work.kind.row.braided:
            yield timed._replace(start=before.start), 1
        else:
            yield timed, None


def start_of(timeline: Timeline) -> float:
    return min((rank[0].start for rank in timeline.ranks if rank), default=0.0)


def typical_length(timelines: Iterable[Timeline]) -> float:
    """A length that nine of ten passes reach, those that take no time aside: drawings make it large enough to see.

    Measured passes vary: the shortest tenth may be too small rather than make a drawing many times as long.
    """
    lengths = sorted(end - start for timeline in timelines for rank in timeline.ranks for _, start, end in rank if end > start)
    return lengths[len(lengths) // 10] if lengths else 0.0
