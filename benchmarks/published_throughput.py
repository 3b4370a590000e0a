"""Published throughputs of pipelined trainings, in 16 bits and fewer, beside what the model of time predicts of them.

    python benchmarks/published_throughput.py FOLDER            prints the table of docs/model.md
    python benchmarks/published_throughput.py FOLDER --write    fits, and writes efficiencies, ranges and the table

FOLDER has throughput*.json: lists of rows with release, model, gpu, precision, gpus, gbs, mbs, seq, tp, pp, cp, vp, ep (all as
NVIDIA's pages of performance name them), and tokens and tflops, each per second and GPU. Schedules are megatron-core's; tokens go
to experts by DeepEP or HybridEP. Pages say nothing of recomputation, so memory is not limited. Of DeepSeek-V3, operations for
each token tell whether there is a layer of multi-token prediction.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from common import command_line, markdown, write_tables
from published import DEVICES, ROOT

from megatron.pipeline.cli.memory import quietly
from megatron.pipeline.cli.tune import base_flags
from megatron.pipeline.flags.settings import Flags
from megatron.pipeline.planner.costmodel.device import NOT_FITTED, Device, named, shipped
from megatron.pipeline.planner.costmodel.ranges import FILE, WHOLE, Range, table
from megatron.pipeline.planner.planning.request import Variant
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.names import STOCK
from megatron.pipeline.planner.shape.stages import balanced_layers
from megatron.pipeline.tune.candidate import SIZES, Candidate, Cluster
from megatron.pipeline.tune.iteration import Result, evaluate
from megatron.pipeline.tune.layouts import Layouts

MODELS = json.loads((Path(__file__).parent / "published_models.json").read_text(encoding="utf-8"))
RECIPES = json.loads((Path(__file__).parent / "published_recipes.json").read_text(encoding="utf-8"))
FLAGS = {
    "BF16": {},
    "FP8": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "MXFP8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "NVFP4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
PRECISIONS = dict(zip(FLAGS, (WHOLE, "fp8", "mxfp8", "nvfp4"), strict=True))
FEW = 8  # rows of a class, below which it takes the range of all precisions
SHARE = 0.9  # of unseen rows of a class that its range contains
# By how much a later release made experts faster in an unchanged layout: 17 to 30 % from 26.02 to 26.06, which is not among rows.
PROGRESS = {"experts": 1.3}
_TRIED = (0.25, 0.9)  # efficiencies, between which seconds are as good as linear in their inverse
_TELLS = 1.35  # how many times as fast a row is at the second of them, at least, if it says anything of products


@dataclass(frozen=True)
class Row:
    """A published training; see above."""

    release: str
    model: str
    gpu: str
    precision: str
    gpus: int
    gbs: int
    mbs: int
    seq: int
    tp: int
    pp: int
    cp: int
    vp: int
    ep: int
    tokens: float
    tflops: float

    @property
    def kind(self) -> str:
        return "experts" if self.ep > 1 else "dense"

    @property
    def device(self) -> Device:
        return named({"H100": "H100-80GB"}.get(self.gpu, self.gpu))

    @property
    def products(self) -> tuple[str, str]:
        """What has one efficiency."""
        return self.gpu, self.precision

    def at(self, efficiency: float) -> Device:
        """Its GPU, on which products in its precision have an efficiency."""
        return at(self.device, PRECISIONS[self.precision], efficiency)


def at(device: Device, precision: str, efficiency: float, fitted_to: str = NOT_FITTED, lent: str = "") -> Device:
    own: dict[str, Any] = {"efficiency": efficiency, "fitted_to": fitted_to, "lent": lent}
    if precision == PRECISIONS["BF16"]:
        return replace(device, **own)
    return replace(device, precisions=tuple(replace(one, **own) if one.name == precision else one for one in device.precisions))


def read(folder: Path) -> list[Row]:
    """The rows of pipelines; ends the program where there are none."""
    files = sorted(folder.glob("throughput*.json"))
    rows = [Row(**row) for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    if not rows:
        raise SystemExit(f"{folder}: expected throughput*.json")
    return [row for row in rows if row.pp > 1]


@cache
def _base(model: str, seq: int, batch: int) -> Flags:
    model_flags = MODELS[model].replace("configs/", f"{ROOT}/configs/").split()
    return base_flags([*model_flags, "--seq-length", str(seq), "--global-batch-size", str(batch)])


@cache
def training(row: Row) -> tuple[Cluster, Candidate]:
    """The training of a row, under megatron-core's own schedule; memory is not limited."""
    whole = row.device
    per_node = max(size for size in range(1, whole.per_node + 1) if row.gpus % size == 0)
    cluster = Cluster(replace(whole, memory=1e18), row.gpus, per_node)
    changes = {SIZES[name]: getattr(row, name) for name in ("tp", "pp", "cp", "ep")} | {
        "micro_batch_size": row.mbs,
        "sequence_parallel": row.tp > 1,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "pipeline_schedule": STOCK,
        "num_virtual_stages_per_pipeline_rank": row.vp if row.vp > 1 else None,
    }
    if row.ep > 1:
        known = RECIPES.get(row.model, {})
        changes |= (
            {"expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "flex"} | known.get("*", {}) | known.get(row.gpu, {})
        )
    if row.model == "DeepSeekV3" and row.tflops / row.tokens > 0.255:
        changes["mtp_num_layers"] = 1
    with quietly():
        base = _base(row.model, row.seq, row.gbs)
        args = Layouts(base | FLAGS[row.precision], cluster).changed(changes)
    variant = Variant("interleaved", row.vp) if row.vp > 1 else Variant("1f1b")
    placement = families.placement(variant.name, row.pp, variant.chunks)
    # Where stages cannot be equal, embedding and output layer count as layers, as in NVIDIA's recipes.
    last = 1.0 + 2 * (args.mtp_num_layers or 0)
    ends = {0: 1.0, placement.last_stage: last} if args.num_layers % (placement.last_stage + 1) else {}
    return cluster, Candidate(args, changes, variant, tuple(balanced_layers(args.num_layers, placement, ends)))


@cache
def predicted(row: Row, device: Device) -> float:
    """Tokens per second and GPU."""
    cluster, candidate = training(row)
    result = evaluate(replace(cluster, device=replace(device, memory=1e18)), candidate)
    assert isinstance(result, Result)
    return result.tokens_per_second / row.gpus


@cache
def tells(row: Row) -> bool:
    """Whether a row says anything of the efficiency: not where hosts launching kernels, or messages, take most of its time."""
    return predicted(row, row.at(_TRIED[1])) > _TELLS * predicted(row, row.at(_TRIED[0]))


@cache
def wanted(row: Row) -> float:
    """The efficiency at which a row is predicted as published; at most 1."""
    first, last = (1 / predicted(row, row.at(efficiency)) for efficiency in _TRIED)
    slope = (first - last) / (1 / _TRIED[0] - 1 / _TRIED[1])
    return round(1 / max(1.0, 1 / _TRIED[0] + (1 / row.tokens - first) / slope), 3)


def efficiency(rows: Sequence[Row]) -> float:
    """One that a row wants, and from which all rows together deviate least."""
    return min(map(wanted, rows), key=lambda each: sum(abs(math.log(predicted(row, row.at(each)) / row.tokens)) for row in rows))


def fitted_elsewhere(row: Row) -> bool:
    """Tell whether ``published.py`` has the efficiency."""
    return row.precision == "BF16" and row.device.fitted_to != NOT_FITTED and "Megatron-Bridge" not in row.device.fitted_to


def held_out(row: Row, rows: Sequence[Row], like: Callable[[Row], bool]) -> float | None:
    """Published over predicted tokens at the efficiency that rows which are ``like`` it want; None where there is none."""
    if fitted_elsewhere(row):
        return row.tokens / predicted(row, row.device)
    others = [other for other in rows if like(other) and tells(other)]
    # A GPU none of whose rows tell has the efficiency of others.
    others = others or [other for other in rows if other.precision == row.precision and other.gpu != row.gpu and tells(other)]
    return row.tokens / predicted(row, row.at(efficiency(others))) if others else None


def without_release(row: Row, rows: Sequence[Row]) -> float | None:
    return held_out(row, rows, lambda other: other.products == row.products and other.release != row.release)


def without_gpu(row: Row, rows: Sequence[Row]) -> float | None:
    """As for a GPU whose efficiency is not fitted."""
    return held_out(row, rows, lambda other: other.precision == row.precision and other.gpu != row.gpu)


def narrowest(ratios: Sequence[float]) -> tuple[float, float]:
    """The narrowest interval that one more of them lies in with a probability of ``SHARE``, or of all where they are too few.

    Of n alike, one more lies between the i-th and the j-th smallest with a probability of (j - i) / (n + 1): order statistics.
    """
    ordered = sorted(ratios)
    apart = min(math.ceil(SHARE * (len(ordered) + 1)), len(ordered) - 1)
    return min(zip(ordered, ordered[apart:], strict=False), key=lambda pair: pair[1] / pair[0])


def learnt(rows: Sequence[Row], found: Callable[[Row, Sequence[Row]], float | None], fitted: bool) -> list[Range]:
    """One of each class that has enough rows, and one of each kind."""
    ratios = [(row, ratio) for row in rows if (ratio := found(row, rows)) is not None]
    releases = ", ".join(sorted({row.release for row in rows}))
    listed = []
    for kind in ("dense", "experts"):
        for precision in ("", *PRECISIONS.values()):
            own = [ratio for row, ratio in ratios if row.kind == kind and precision in ("", PRECISIONS[row.precision])]
            if len(own) >= FEW:
                low, high = narrowest(own)
                source = f"{len(own)} published throughputs of Megatron-Bridge {releases}"
                listed.append(
                    Range(
                        "throughput", kind, precision, fitted, round(low, 3), round(high, 3), source, str(datetime.date.today())
                    )
                )
    return listed


def contained(rows: Sequence[Row], kind: str) -> list[bool]:
    """Whether each row of a kind lies within the range that the other releases would have given."""
    found = []
    for row in rows:
        ratio = without_release(row, rows)
        if row.kind == kind and ratio is not None:
            others = learnt([other for other in rows if other.release != row.release], without_release, True)
            classes = {each.precision: each for each in others if each.kind == kind}
            each = classes.get(PRECISIONS[row.precision], classes[""])
            found.append(each.low <= ratio <= each.high)
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """Those of docs/model.md: errors, and efficiencies."""
    errors = []
    for kind in ("dense", "experts"):
        own, inside = [row for row in rows if row.kind == kind], contained(rows, kind)
        shares = f"{sum(inside) / len(inside):.0%}", ""
        for share, name, found in zip(shares, ("another release", "another GPU"), (without_release, without_gpu), strict=True):
            off = sorted(abs(1 / ratio - 1) for row in own if (ratio := found(row, rows)) is not None)
            cells = [f"{len(off)} of {len(own)}", f"{median(off):.1%}", f"{off[int(0.9 * len(off))]:.1%}", share]
            errors.append([kind, name, *cells])
    listed = [
        [f"`{device.name}`", WHOLE if one is device else one.name, f"{one.peak / 1e12:g}", f"{one.efficiency:g}", one.fitted_to]
        for device in map(named, shipped())
        for one in (device, *map(device.products, (one.name for one in device.precisions)))
    ]
    return [
        markdown(["", "efficiencies of", "rows", "median error", "90 % within", "in the range"], errors),
        markdown(["GPU", "products in", "TFLOP/s", "efficiency", "fitted to"], listed),
    ]


def write_efficiencies(rows: Sequence[Row]) -> None:
    """Fit. What linears in 16 bits reach counts in all other precisions, so that they come first."""
    for whole in (True, False):
        for products in dict.fromkeys(row.products for row in rows if (row.precision == "BF16") is whole):
            own = [row for row in rows if row.products == products and tells(row)]
            if own and not fitted_elsewhere(own[0]):
                words = f"{len(own)} rows of Megatron-Bridge {', '.join(sorted({row.release for row in own}))}"
                device = at(named(own[0].device.name), PRECISIONS[products[1]], efficiency(own), words)
                _write(device)
        lend()
        for function in (training, predicted, wanted, tells):
            function.cache_clear()


def lend() -> None:
    """Give every GPU the efficiencies that its file says another one lends it."""
    for name in shipped():
        for precision in (WHOLE, *(one.name for one in named(name).precisions)):
            own, of = named(name), "" if precision == WHOLE else precision
            if lent := own.products(of).lent:
                _write(at(own, precision, named(lent).products(of).efficiency, lent=lent))


def _write(device: Device) -> None:
    (DEVICES / f"{device.name}.json").write_text(device.to_json(), encoding="utf-8")
    named.cache_clear()


def _with_progress(row: Range) -> Range:
    more = PROGRESS.get(row.kind)
    return replace(row, high=round(more * row.high, 3), source=f"{row.source}; high times {more} for later ones") if more else row


def write_ranges(rows: Sequence[Row]) -> None:
    kept = [row for row in table() if "Megatron-Bridge" not in row.source]
    own = [*learnt(rows, without_release, True), *learnt(rows, without_gpu, False)]
    found = [*kept, *map(_with_progress, own)]
    lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in found)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="of throughput*.json")
    parser.add_argument("--write", action="store_true", help="fit the devices, and write them, the ranges and the tables")
    options = parser.parse_args()
    rows = read(options.folder)
    if options.write:
        write_efficiencies(rows)
        write_ranges(rows)
    found = tables(rows)
    print("\n".join(found))
    if options.write:
        write_tables(ROOT / "docs" / "model.md", found)


if __name__ == "__main__":
    main()
