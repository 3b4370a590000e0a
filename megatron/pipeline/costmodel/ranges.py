"""Uncertainty of predictions: what was published or measured over what was predicted, by the class of a training.

``ranges.json`` has the table, with what each row was learnt from and when; benchmarks/published_throughput.py writes those of
throughputs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.pipeline.costmodel.device import NOT_FITTED, Device
from megatron.pipeline.shape.gpt import Shape

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
    """The range of a training: of its own class, or of the nearest that has one."""
    precision = shape.quantized.recipe.peak if shape.quantized else ""
    kind, fitted = "experts" if shape.experts else "dense", device.products(precision).fitted_to != NOT_FITTED

    def distance(row: Range) -> tuple[bool, bool, bool]:
        """Precision matters least: a row of another one never counts."""
        return row.kind != kind, row.fitted != fitted, row.precision == ""

    return min((row for row in table() if row.what == what and row.precision in ("", precision or WHOLE)), key=distance)


def in_words(low: float, high: float, unit: str) -> str:
    """Such as ``41 to 46 k tokens/s``."""
    scale, letter = next((pair for pair in ((1e6, "M "), (1e3, "k ")) if high >= 10 * pair[0]), (1.0, ""))
    return f"{low / scale:.3g} to {high / scale:.3g} {letter}{unit}"
