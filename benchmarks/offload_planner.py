"""How little does offloading leave on the device, and how long does it take to plan? Markdown tables.

    python benchmarks/offload_planner.py [--quick] [--json FILE]

F = B = W, no hops; memory is in chunks, of which the whole model has p*v. k is the time of a copy to host memory and back over
that of F, B and W. Seconds are those of one core.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from common import command_line, markdown

from megatron.pipeline import planning
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import CopyCosts, Costs, uniform
from megatron.pipeline.schedule.core.passes import Offload
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.schedule.transforms.offload import host_peaks, moved, offload

Row: TypeAlias = dict[str, Any]


def with_k(k: float, placement: Placement) -> Costs:
    return replace(uniform(placement), copies=CopyCosts(1.5 * k, 1.5 * k))


# --- how far it goes --------------------------------------------------------------------------------------------------


# A family, and its memory limit as a share of 1F1B's memory.
Base: TypeAlias = tuple[str, float | None]


def reach(quick: bool) -> list[Row]:
    shapes = [(2, 4, 8), (3, 3, 7), (4, 2, 16), (4, 4, 16), (4, 8, 16), (8, 2, 32), (8, 4, 32)]
    bases: list[Base] = [("interleaved", None), ("gis", None), ("gis-h", None), ("zb-auto", 0.625), ("zb-auto", 0.5)]
    return _left("What is left, by what is offloaded", shapes[:: 3 if quick else 1], bases, (0.5, 1.0, 1.5, 2.0))


def large(quick: bool) -> list[Row]:
    bases: list[Base] = [("interleaved", None), ("gis-h", None), ("zb-auto", 0.5)]
    few = slice(1 if quick else 2), slice(2 if quick else 3)
    return _left("Large instances", [(8, 8, 64), (16, 4, 128)][few[0]], bases[few[1]], (1.0, 1.5))


def _left(title: str, shapes: Sequence[tuple[int, int, int]], bases: Sequence[Base], ks: Sequence[float]) -> list[Row]:
    rows = [
        row
        for p, v, m in shapes
        for name, share in bases
        for row in _reached(name, p, v, m, ks, None if share is None else max(1.0, share * p))
    ]
    print(f"### {title}\n")
    columns = ["", "limit", "p", "v", "m", "k", "mode", "without", "left", "of p*v", "moved", "host", "span", "to without"]
    lines = (
        (
            f"`{row['name']}`", row["limit"] or "", row["p"], row["v"], row["m"], row["k"], row["mode"], f"{row['before']:g}",
            f"{row['after']:g}", row["p"] * row["v"], f"{row['moved']:.0%}", f"{row['host']:g}", f"{row['span']:g}",
            f"{row['ratio']:.4f}", row["base s"], row["s"],
        )
        for row in rows
    )  # fmt: skip
    print(markdown([*columns, "base s", "s"], lines))
    return rows


def _reached(name: str, p: int, v: int, m: int, ks: Sequence[float], limit: float | None) -> Iterator[Row]:
    placement = families.placement(name, p, v)
    began = time.perf_counter()
    plain = planning.plan(name, p, m, uniform(placement), v, limit)
    base_seconds = time.perf_counter() - began
    for k in ks:
        costs = with_k(k, placement)
        for mode in Offload:
            began = time.perf_counter()
            schedule = offload(plain, costs, mode)
            seconds = time.perf_counter() - began
            yield {
                "name": name, "limit": limit, "p": p, "v": v, "m": m, "k": k, "mode": str(mode),
                "before": max(activation_peaks(plain, costs)) * v, "after": max(activation_peaks(schedule, costs)) * v,
                "moved": max(moved(schedule, costs)) / m, "host": max(host_peaks(schedule, costs)) * v,
                "span": simulate(schedule, costs).span, "ratio": simulate(schedule, costs).span / simulate(plain, costs).span,
                "base s": round(base_seconds, 2), "s": round(seconds, 3),
            }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few instances only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    numbers = {part.__name__: part(options.quick) for part in (reach, large)}
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
