"""Uncertainty of predictions: what was published or measured over what was predicted, by the class of a training.

``ranges.json`` has the table, with what each row was learnt from and when; benchmarks/published_throughput.py writes those of
throughputs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megatron.pipeline.planner.costmodel.device import NOT_FITTED, Device, named
from megatron.pipeline.planner.shape.gpt import Shape

# Of what was measured: the power of a distance beyond it by which a range widens, an assumption; the least and the most of hidden
# sizes, and of tokens of a sequence.
_MEASURED = {"throughput": (0.5, (2048, 16384), (1024, 32768)), "memory": (0.125, (512, 16384), (1024, 8192))}
# GPUs, and seconds that each doubling beyond them may add to an iteration: in MLPerf Training v6.0 (DeepSeek-V3), 1.5 to 1.9 s of
# one do not shrink on 8192 GPUs, 0.3 s by prediction; on 512 both agree. An assumption for other models.
_AGREED, _LATER = 512, 0.4
FILE = Path(__file__).parent / "ranges.json"
WHOLE = "16 bits"


@dataclass(frozen=True)
class Range:
    """Most of what was measured of a class of trainings lies between ``low`` and ``high`` times what was predicted.

    Attributes:
        what: ``throughput``, ``memory``, or ``schedules``: throughput over that of another schedule in the same layout.
        kind: ``dense`` or ``experts``.
        precision: of linears, as in a GPU's file; empty for all.
        fitted: whether the efficiency of these products on that GPU is fitted.
        source: what it was learnt from; with its date.
    """

    what: str
    kind: str
    precision: str
    fitted: bool
    low: float
    high: float
    source: str
    date: str

    def of(self, predicted: float) -> tuple[float, float]:
        return self.low * predicted, self.high * predicted


@cache
def table() -> tuple[Range, ...]:
    return tuple(Range(**row) for row in json.loads(FILE.read_text(encoding="utf-8")))


def learnt(what: str, shape: Shape, device: Device) -> Range:
    """The range of a training: of its own class, or of the nearest that has one; wider where it is far from what was measured."""
    precision = shape.quantized.recipe.peak if shape.quantized else ""
    products = device.products(precision)
    kind, fitted = "experts" if shape.experts else "dense", products.fitted_to != NOT_FITTED

    def distance(row: Range) -> tuple[bool, bool, bool]:
        """Precision matters least: a row of another one never counts."""
        return row.kind != kind, row.fitted != fitted, row.precision == ""

    found = min((row for row in table() if row.what == what and row.precision in ("", precision or WHOLE)), key=distance)
    power, *bounds = _MEASURED.get(what, (0.0,))
    sizes = zip((("hidden", shape.hidden), ("seq", shape.seq)), bounds, strict=False)
    far = {f"{name} {size}": max(least / size, size / most) for (name, size), (least, most) in sizes}
    if what == "throughput" and products.lent:
        other, own = (one.peak / one.bandwidth for one in (named(products.lent), device))
        far[f"a peak of {own / other:.2g} times {products.lent}'s for its memory's bandwidth"] = max(own / other, other / own)
    wider = math.prod(max(1.0, times) for times in far.values()) ** power
    if wider == 1:
        return found
    source = f"{found.source}; wider for {', '.join(name for name, times in far.items() if times > 1)}, which was not measured"
    return replace(found, low=found.low / wider, high=found.high * wider, source=source)


def at_scale(found: Range, gpus: int, seconds: float) -> Range:
    """The range of an iteration's throughput with a slower end for what grows with ranks: stragglers, data, norms."""
    if gpus <= _AGREED:
        return found
    more = _LATER * math.log2(gpus / _AGREED)
    source = f"{found.source}; up to {more:.2g} s more of an iteration for {gpus} GPUs (MLPerf Training v6.0)"
    return replace(found, low=1 / (1 / found.low + more / seconds), source=source)


def doubts(shape: Shape, device: Device) -> list[str]:
    """A line for each efficiency of another GPU with which the seconds of a model are predicted."""
    precisions = {"", shape.quantized.recipe.peak if shape.quantized else ""}
    lent = [(name or WHOLE, one) for name in sorted(precisions) if (one := device.products(name)).lent]
    words = f"{device.name}: the efficiency in {{}}, {{:g}}, is by that of {{}}; no training on {device.name} in it was compared"
    return [words.format(name, one.efficiency, one.lent) for name, one in lent]


def in_words(low: float, high: float, unit: str) -> str:
    """Such as ``41 to 46 k tokens/s``."""
    scale, letter = next((pair for pair in ((1e6, "M "), (1e3, "k ")) if high >= 10 * pair[0]), (1.0, ""))
    return f"{low / scale:.3g} to {high / scale:.3g} {letter}{unit}"
