"""Gains by plan over NVIDIA's own public recipes, in their layout and with their microbatches, by how much room these leave.

    python benchmarks/recipes.py            prints the table of docs/compared.md, and a short one
    python benchmarks/recipes.py --write    writes the former there

``recipes.json`` has the recipes and where they are from, ``published_recipes.json`` the rest of their flags. Stock is
megatron-core's own schedule of the recipe, with --overlap-param-gather or without, whichever is faster; ours are the families
below, in as much memory as stock's fullest rank takes, to 1 %.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import command_line, markdown, write_tables
from published import ROOT
from published_throughput import Row, training

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.planner.planning.request import Variant
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.shape.stages import balanced_layers
from megatron.pipeline.tune.candidate import Candidate, Cluster
from megatron.pipeline.tune.iteration import Result, evaluate
from megatron.pipeline.tune.layouts import Layouts

RECIPES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
OURS: tuple[tuple[Variant, dict[str, Any]], ...] = (
    (Variant("zb-h1"), {}),
    (Variant("zb-v"), {}),
    (Variant("zb-v"), {"vocab_parallel": "1"}),
)
_MEMORY = 1.01  # times that of stock's fullest rank: limits are searched in steps
LONG = ["regime", "recipe", "GPUs", "p", "chunks", "m", "stock s", "its bubble", "best of ours", "s", "gain"]
SHORT = ["recipes of NVIDIA (Megatron-Bridge 26.02), by plan", "m over p", "gain"]


@dataclass(frozen=True)
class Recipe:
    """One row of ``recipes.json`` and what is predicted of it."""

    regime: str
    row: Row
    stock: Result
    best: Result

    @property
    def microbatches(self) -> int:
        return self.stock.candidate.microbatches

    @property
    def gain(self) -> float:
        return self.stock.seconds / self.best.seconds

    @property
    def schedule(self) -> str:
        """Name of the best of ours, with what is given beside it."""
        spread = self.best.candidate.args.vocabulary.spread
        return self.best.candidate.variant.name + (f", vocabulary {spread}" if spread else "")


def recipes() -> Iterator[Recipe]:
    for regime, *values in RECIPES["rows"]:
        row = Row("", **dict(zip(RECIPES["columns"][1:], values, strict=True)), tokens=1.0, tflops=1.0)
        cluster, candidate = training(row)
        at_once = changed_by(cluster, candidate, {"overlap_param_gather": False})
        trained = [evaluate(cluster, each) for each in (candidate, replace(candidate, args=at_once))]
        stock = min((one for one in trained if isinstance(one, Result)), key=lambda one: one.seconds)
        within = replace(cluster, device=replace(cluster.device, memory=stock.fullest.total * _MEMORY))
        found = [stock]  # where nothing of ours is faster
        for changed in ours(cluster, candidate):
            with suppress(ValueError):
                result = evaluate(within, changed)
                found += [result] if isinstance(result, Result) else []
        yield Recipe(regime, row, stock, min(found, key=lambda each: each.seconds))


def changed_by(cluster: Cluster, candidate: Candidate, changes: dict[str, Any]) -> Settings:
    """The candidate's settings with others."""
    return Layouts(candidate.args, cluster).changed({**candidate.changes, **changes})


def ours(cluster: Cluster, candidate: Candidate) -> Iterator[Candidate]:
    """Our schedules in the layout of a recipe."""
    for variant, way in OURS:
        placement = families.placement(variant.name, candidate.placement.ranks, variant.chunks)
        chunks = placement.chunks if placement.chunks > 1 else None
        changes = {**way, "pipeline_schedule": variant.name, "num_virtual_stages_per_pipeline_rank": chunks}
        with suppress(ValueError):
            args = changed_by(cluster, candidate, changes)
            ends = {} if way else {0: 1.0, placement.last_stage: 1.0 + 2 * (args.mtp_num_layers or 0)}
            yield Candidate(
                args, {**candidate.changes, **changes}, variant, tuple(balanced_layers(args.num_layers, placement, ends))
            )


def tables(found: Sequence[Recipe]) -> list[str]:
    """The long one and the short one."""
    long = []
    for one in found:
        row, bubble = one.row, one.stock.parts
        cells = [str(row.gpus), str(row.pp), str(row.vp), str(one.microbatches), f"{one.stock.seconds:.2f}"]
        cells += [f"{(bubble.bubble + bubble.imbalance) / one.stock.seconds:.0%}", one.schedule, f"{one.best.seconds:.2f}"]
        long.append([one.regime, f"{row.model.replace('_', ' ')}, {row.gpu}, {row.precision}", *cells, f"{one.gain:.2f}"])
    short = []
    for regime in dict.fromkeys(one.regime for one in found):
        own = [one for one in found if one.regime == regime]
        times = sorted(one.microbatches / one.row.pp for one in own)
        gains = sorted(one.gain for one in own)
        short.append([regime, f"{times[0]:g} to {times[-1]:g}", f"{gains[0]:.2f} to {gains[-1]:.2f}"])
    return [markdown(LONG, long), markdown(SHORT, short)]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--write", action="store_true", help="write the long table into docs/compared.md")
    options = parser.parse_args()
    found = tables(list(recipes()))
    print("\n".join(found))
    if options.write:
        write_tables(ROOT / "docs" / "compared.md", found[:1])


if __name__ == "__main__":
    main()
