"""Schedules compared under jitter: the spans that a user may expect where passes do not take what they should."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, quantiles

_INK = "#222222"
_COLOURS = ("#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito's
_WIDTH, _ROW, _TOP, _BOTTOM, _FONT = 9.0, 0.42, 0.62, 0.55, 9.0  # inches, but the font in points


def draw_robustness(
    spans: Mapping[str, Mapping[float, Sequence[float]]],
    path: str | Path,
    unit: str = "",
    title: str = "",
    measured: str = "span",
) -> None:
    """Draw the expected span of schedules at each amount of jitter, with the range that nine of ten runs fall into.

    Args:
        spans: by schedule, then by jitter (0.1 for 10 %), the span of every simulated run; one run is enough at 0.
        path: where the picture goes; its suffix, .png or .svg, is the format.
        unit: of time, for the axis.
        title: of the plot, such as the shape.
        measured: what the spans are, for the axis: they may as well be makespans.

    Raises:
        ValueError: there is nothing to draw, a schedule has no runs at some jitter, or the suffix is another one.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    if not spans:
        raise ValueError("nothing to draw: give at least one schedule")
    if Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"cannot draw {path}: the file name must end in .png or .svg")
    for name, by_jitter in spans.items():
        if not by_jitter or not all(by_jitter.values()):
            raise ValueError(f"{name} has no runs to draw: give at least one span for every amount of jitter")
    jitters = sorted({jitter for by_jitter in spans.values() for jitter in by_jitter})
    height = _TOP + _ROW * len(spans) + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height), facecolor="white", dpi=160)
    axes = figure.add_axes((0.14, _BOTTOM / height, 0.83, _ROW * len(spans) / height))
    for index, jitter in enumerate(jitters):
        offset = 0.6 * ((index + 0.5) / len(jitters) - 0.5)
        rows = [row + offset for row, by_jitter in enumerate(spans.values()) if jitter in by_jitter]
        runs = [by_jitter[jitter] for by_jitter in spans.values() if jitter in by_jitter]
        means = [fmean(values) for values in runs]
        ranges = [_nine_of_ten(values) for values in runs]
        colour = _COLOURS[index % len(_COLOURS)]
        axes.hlines(rows, [low for low, _ in ranges], [high for _, high in ranges], color=colour, linewidth=2, alpha=0.6)
        axes.plot(means, rows, "o", color=colour, markersize=5, label=f"jitter {jitter:.0%}" if jitter else "no jitter")
    axes.set_yticks(range(len(spans)), list(spans))
    axes.set_ylim(len(spans) - 0.5, -0.5)
    axes.grid(axis="x", color="#E8E8E8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=_FONT, colors=_INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    what = f"{measured} ({unit})" if unit else measured
    axes.set_xlabel(f"{what}: the dot is the mean, the bar spans nine of ten runs", fontsize=_FONT, color=_INK)
    if title:
        figure.text(0.14, 1 - 0.08 / height, title, va="top", fontsize=_FONT + 2, fontweight="bold", color=_INK)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(jitters), fontsize=_FONT, frameon=False, borderaxespad=0.2)
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def _nine_of_ten(values: Sequence[float]) -> tuple[float, float]:
    """The 5th and the 95th percentile."""
    if len(values) == 1:
        return values[0], values[0]
    cuts = quantiles(values, n=20, method="inclusive")
    return cuts[0], cuts[-1]
