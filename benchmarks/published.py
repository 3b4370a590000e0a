"""Published trainings beside what the model of time and memory predicts of them, and the efficiencies that are fitted to them.

    python benchmarks/published.py            prints the tables of docs/model.md, docs/vocabulary.md and benchmarks/README.md
    python benchmarks/published.py --write    fits, and writes efficiencies into the devices' files and tables into the documents

One schedule is planned for every cell of ``published_figures``, and both its time and its memory are predicted.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from common import command_line, markdown, write_tables
from published_figures import A100, H100, RANKS, REACHED, ROOT, SOURCES, Column, Method, Source

from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.costmodel.device import Device, named
from megatron.pipeline.planner.costmodel.estimate import computing_seconds, estimate
from megatron.pipeline.planner.costmodel.memory import GIB, predict
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.kinds import MOST_WAITING
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.problem import Objective
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.planner.shape import gpt
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.stages import balanced_layers

DOCUMENTS = tuple(ROOT / page for page in ("docs/model.md", "docs/notes/model.md", "docs/vocabulary.md", "benchmarks/README.md"))
DEVICES = ROOT / "megatron" / "pipeline" / "planner" / "costmodel" / "devices"
HIDDEN_SIZES = (4096, 5120, 6144, 7168, 8192, 10240)
SEQUENCE_LENGTHS = (4096, 8192, 16384, 32768)


class Pair(NamedTuple):
    """A number as predicted and as published."""

    predicted: float
    published: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Cell:
    """What was published of one method in one column, and what is predicted; throughput also of the column's baseline."""

    source: str
    column: str
    method: str
    throughput: Pair
    memory: Pair
    baseline: Pair

    @property
    def speedup(self) -> Pair:
        """Over the baseline."""
        return Pair(*(own / other for own, other in zip(self.throughput, self.baseline, strict=True)))

    @property
    def relative_error(self) -> float:
        """Of the throughput relative to the baseline of the column."""
        return self.speedup.error


def cells(device: Device, sources: Sequence[Source] = SOURCES) -> list[Cell]:
    return [cell for source in sources for column in source.columns for cell in _column(source, column, device)]


def _column(source: Source, column: Column, device: Device) -> list[Cell]:
    found = {name: _predict(source, column, method, device) for name, method in source.methods.items()}
    throughput = {name: Pair(rate, column.throughput[name]) for name, (rate, _) in found.items()}
    return [
        Cell(source.name, column.name, name, throughput[name], Pair(memory, column.memory[name]), throughput[source.baseline])
        for name, (_, memory) in found.items()
    ]


def _predict(source: Source, column: Column, method: Method, device: Device) -> tuple[float, float]:
    """Throughput and memory of the fullest rank, in the source's units."""
    args = _arguments(column.flags)
    shape = shape_of(args)
    family = families.named(method.schedule)
    placement = families.placement(method.schedule, RANKS, column.chunks if family.name == "interleaved" else None)
    layers = balanced_layers(shape.layers, placement, _not_layers(source, method, shape, placement))
    hops = family.exposed_hops if method.waits else 0.0
    costs = estimate(shape, placement, layers, device, method.vocabulary, exposed_hops=hops)
    objective = Objective.MAKESPAN if method.synchronized else Objective.SPAN
    planned = costs if method.synchronized else _medians(costs)

    def plan(microbatches: int, limit: float | None) -> Schedule:
        """Args: limit: microbatches that a rank may hold."""
        most = max(stage.activation for stage in planned.stages)
        return planning.plan(
            family.name,
            RANKS,
            microbatches,
            planned,
            placement.chunks,
            None if limit is None else limit * most + (MOST_WAITING + 1) * planned.vocabulary.activation,
            objective=objective,
            vocabulary=method.vocabulary,
        )

    schedule = plan(column.microbatches, method.limit)
    seconds = objective.length(simulate(schedule, costs))
    held = predict(describe(args), schedule if method.held is None else plan(4 * RANKS, method.held), layers, device)
    fullest = max(rank.allocated for rank in held)
    return source.rate(shape, column.microbatches / seconds), fullest / source.byte_unit


@cache
def _arguments(flags: tuple[str, ...]) -> argparse.Namespace:
    return predicted([*flags, "--pipeline-schedule", "stock"]).args


def _not_layers(source: Source, method: Method, shape: Shape, placement: Placement) -> Mapping[int, float]:
    """What stages do beside layers, in layers, where layers make room for it."""
    if method.redistributes:  # by Narayanan's operations, in which layers recompute: see tests/tune/test_estimate.py
        return {placement.last_stage: shape.output_in_layers(recompute=True)}
    return dict.fromkeys((0, placement.last_stage), float(source.ends))


def _medians(costs: Costs) -> Costs:
    """What Zero Bubble's planner is given: for every stage the median F, B and W of all, and its own memory, in microbatches."""
    forward, backward, weight = (
        statistics.median(getattr(stage, name) for stage in costs.stages) for name in ("forward", "backward", "weight")
    )
    stages = (StageCosts(forward, backward, weight, 1.0, stage.retained / stage.activation) for stage in costs.stages)
    return replace(costs, stages=tuple(stages))


def published_shape(hidden: int, seq: int) -> Shape:
    """A layer of the models in figure 1 of the PipeOffload paper: heads 128 wide that share 8 groups of keys and values."""
    return replace(Shape.plain(1, hidden, hidden // 128, seq, 1), groups=8)


def reached(device: Device) -> list[float]:
    """TFLOP/s of all layers of figure 1 of the PipeOffload paper."""
    found = []
    for hidden in HIDDEN_SIZES:
        for seq in SEQUENCE_LENGTHS:
            shape = replace(published_shape(hidden, seq), norm=2, biases=True, qkv_bias=True)
            found.append(gpt.layer_work(shape).total / computing_seconds(shape, device).total / 1e12)
    return found


def deviations(device: Device, found: Sequence[Cell]) -> dict[str, list[float]]:
    """By source, logarithms of predicted over published throughput."""
    logs: dict[str, list[float]] = {}
    for cell in found:
        logs.setdefault(cell.source, []).append(math.log(cell.throughput.predicted / cell.throughput.published))
    logs["PipeOffload"] = [math.log(value / REACHED[device.name]) for value in reached(device)]
    return logs


def imbalance(device: Device, found: Sequence[Cell]) -> float:
    """The deviations' mean, each source weighing the same: 0 where the efficiency is fitted."""
    return statistics.mean(map(statistics.mean, deviations(device, found).values()))


def cells_of(device: Device) -> list[Cell]:
    """What a device is fitted to besides ``REACHED``: both tables are of A100s."""
    return cells(device) if device.name == A100 else []


def fitted(device: Device, tolerance: float = 2e-4) -> Device:
    """The device with the efficiency, rounded to three digits, at which predictions are as often above as below."""
    while abs(off := imbalance(device, cells_of(device))) > tolerance:
        device = replace(device, efficiency=device.efficiency * math.exp(-off))
    return replace(device, efficiency=round(device.efficiency, 3))


def tables(found: Sequence[Cell]) -> list[str]:
    """The Markdown tables of the documents, for the devices as they are."""
    shown = [_throughputs(source, found) for source in SOURCES]
    shown += [_peaks(source, found) for source in SOURCES]
    shown.append(_grids(SOURCES[1], found, "predicted MFU", lambda cell: f"{cell.throughput.predicted:.1f} %")[:1])
    return [_fit(found), *(table for each in shown for table in each)]


def _throughputs(source: Source, found: Sequence[Cell]) -> list[str]:
    head = f"{source.name}: `{source.baseline}` in {source.unit}, others over it"

    def shown(cell: Cell) -> str:
        if cell.method == source.baseline:
            return f"{cell.throughput.predicted:.4g} / {cell.throughput.published:.4g} ({cell.throughput.error:+.1%})"
        return f"{cell.speedup.predicted:.2f} / {cell.speedup.published:.2f} ({cell.relative_error:+.1%})"

    return _grids(source, found, head, shown)


def _peaks(source: Source, found: Sequence[Cell]) -> list[str]:
    head = f"{source.name}: {'GiB' if source.byte_unit == GIB else 'GB'} of the fullest GPU"

    def shown(cell: Cell) -> str:
        return f"{cell.memory.predicted:.1f} / {cell.memory.published:.4g} ({cell.memory.error:+.1%})"

    return _grids(source, found, head, shown)


def _grids(source: Source, found: Sequence[Cell], head: str, shown: Callable[[Cell], str]) -> list[str]:
    """One table for every model, methods by columns."""
    grids = []
    for group in dict.fromkeys(column.name.split(", ")[0] for column in source.columns):
        columns = [column.name for column in source.columns if column.name.startswith(f"{group}, ")]
        rows = [
            [f"`{method}`", *(shown(cell) for cell in found if cell.method == method and cell.column in columns)]
            for method in source.methods
        ]
        grids.append(markdown([f"{head}, {group}", *(name.split(", ")[1] for name in columns)], rows))
    return grids


def _fit(found: Sequence[Cell]) -> str:
    rows = []
    for name in (A100, H100):
        device = named(name)
        for source, logs in deviations(device, found if name == A100 else ()).items():
            errors = [math.expm1(log) for log in logs]
            rows.append(
                [f"`{name}`", f"{device.efficiency:g}", source, str(len(logs))]
                + [f"{error:+.1%}" for error in (math.expm1(statistics.mean(logs)), min(errors), max(errors))]
            )
    return markdown(["device", "efficiency", "throughputs of", "cells", "mean deviation", "least", "most"], rows)


def worst(found: Sequence[Cell], error: Callable[[Cell], float] = lambda cell: cell.relative_error) -> Cell:
    return max(found, key=lambda cell: abs(error(cell)))


def summary(found: Sequence[Cell]) -> str:
    """The sentence of docs/model.md that says how good it is."""
    slow, full = worst(found), worst(found, lambda cell: cell.memory.error)
    return (
        f"The worst of {len(found)} throughputs relative to the baseline of its column is {slow.relative_error:+.1%} "
        f"({slow.source}, `{slow.method}`, {slow.column}),\nthe worst peak {full.memory.error:+.1%} "
        f"({full.source}, `{full.method}`, {full.column}).\n"
    )


def _write(found: Sequence[Cell]) -> None:
    for document in DOCUMENTS:
        write_tables(document, tables(found))
        text = document.read_text(encoding="utf-8")
        text = re.sub(r"^The worst of \d+ throughputs .*\n.*\n", summary(found), text, flags=re.M)
        document.write_text(text, encoding="utf-8")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--write", action="store_true", help="fit the devices, and write them and the tables")
    options = parser.parse_args()
    if options.write:
        (DEVICES / f"{A100}.json").write_text(fitted(named(A100)).to_json(), encoding="utf-8")
        named.cache_clear()
    found = cells(named(A100))
    print("\n".join([*tables(found), summary(found)]))
    if options.write:
        _write(found)


if __name__ == "__main__":
    main()
