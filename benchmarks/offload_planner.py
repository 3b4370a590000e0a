"""How little does offloading leave on the device, against the least there is, and how long does it take? Markdown tables.

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
from exact_offload import least_peak

from megatron.pipeline import planning
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import CopyCosts, Costs, uniform
from megatron.pipeline.schedule.core.passes import Offload
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.schedule.transforms.offload import host_peaks, moved, offload

Row: TypeAlias = dict[str, Any]


def with_k(k: float, placement: Placement) -> Costs:
    return replace(uniform(placement), copies=CopyCosts(1.5 * k, 1.5 * k))


# --- against the least there is ---------------------------------------------------------------------------------------


def gaps(quick: bool) -> list[Row]:
    instances: list[tuple[str, int, int, int, float | None]] = [
        ("1f1b", 4, 1, 12, None), ("1f1b", 8, 1, 16, None), ("interleaved", 4, 2, 8, None), ("interleaved", 4, 4, 8, None),
        ("interleaved", 3, 3, 7, None), ("gis", 4, 2, 8, None), ("gis-h", 4, 4, 8, None), ("v-half", 4, 2, 8, None),
        ("v-min", 5, 2, 10, None), ("zb-auto", 4, 2, 12, 2.0), ("zb-auto", 4, 4, 12, 2.0), ("zb-auto", 3, 5, 7, 1.5),
    ]  # fmt: skip
    rows: list[Row] = []
    for name, p, v, m, limit in instances[:: 4 if quick else 1]:
        placement = families.placement(name, p, v)
        plain = planning.plan(name, p, m, uniform(placement), v, limit)
        for mode in Offload:
            for k in (0.5, 1.0, 1.5, 2.0)[:: 3 if quick else 1]:
                rows.append(
                    {"name": name, "p": p, "v": v, "m": m, "mode": str(mode), "k": k} | _gap(plain, with_k(k, placement), mode)
                )
    print("### Peaks against the least that any choice and placing of copies reaches\n")
    keys = ["p", "v", "m", "mode", "k", "before", "ours", "least", "above", "ranks", "open", "ours s", "least s"]
    columns = ["", "p", "v", "m", "mode", "k", "without", "planned", "least", "above it", "ranks above", "not proven", "s"]
    lines = (
        (f"`{row['name']}`", *(f"{row[key]:g}" if isinstance(row[key], float) else row[key] for key in keys)) for row in rows
    )
    print(markdown([*columns, "s of CP-SAT"], lines))
    print(
        f"{sum(row['above'] == 0 for row in rows)} of {len(rows)} plans hold the least on their fullest rank; "
        f"{sum(row['ranks'] for row in rows)} of {sum(row['p'] for row in rows)} ranks hold more than the least, "
        f"{sum(row['open'] for row in rows)} searches were not over.\n"
    )
    return rows


def _gap(plain: Schedule, costs: Costs, mode: Offload) -> Row:
    chunks = plain.placement.chunks
    began = time.perf_counter()
    schedule = offload(plain, costs, mode)
    planned = time.perf_counter()
    found = [least_peak(plain, costs, rank, mode, seconds=3) for rank in range(plain.ranks)]
    searched = time.perf_counter()
    ours = [peak * chunks for peak in activation_peaks(schedule, costs)]
    least = [one.value * chunks for one in found]
    return {
        "before": max(activation_peaks(plain, costs)) * chunks,
        "ours": max(ours),
        "least": max(least),
        "above": round(max(ours) - max(least), 6),
        "ranks": sum(mine > best + 1e-6 for mine, best in zip(ours, least, strict=True)),
        "open": sum(not one.proven for one in found),
        "ours s": round(planned - began, 3),
        "least s": round(searched - planned, 2),
    }


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
    numbers = {part.__name__: part(options.quick) for part in (gaps, reach, large)}
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
