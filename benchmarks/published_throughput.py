"""Published throughputs of trainings, in 16 bits and fewer, beside what the model of time predicts of them.

    python benchmarks/published_throughput.py FOLDER            prints the table of docs/model.md
    python benchmarks/published_throughput.py FOLDER --write    fits, and writes efficiencies, ranges and the table

FOLDER has throughput*.json: lists of rows with release, model, gpu, precision, gpus, gbs, mbs, seq, tp, pp, cp, vp, ep (all as
NVIDIA's pages of performance name them), and tokens and tflops, each per second and GPU. Schedules are megatron-core's. Pages say
nothing of recomputation, so memory is not limited, and weights that FSDP cuts count as if each rank had all. Of DeepSeek-V3,
operations for each token tell whether there is a layer of multi-token prediction. Rows of 25.09 with experts dropped tokens, but
for DeepSeek-V3 on H100, and are left out. One efficiency is that of all GPUs of a generation; what other kernels take (``moved``
and ``attention`` of a device, ``traffic.COPIES`` and those beside it, ``estimate.LAYER``) was fitted to the same rows.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from common import command_line, markdown, write_tables
from published import DEVICES, ROOT, fitted
from published_figures import REACHED

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
from megatron.pipeline.tune.costs import CandidateCosts
from megatron.pipeline.tune.iteration import Result, evaluate, least_seconds
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
GENERATIONS = {"B200": "Blackwell", "GB200": "Blackwell", "B300": "Blackwell Ultra", "GB300": "Blackwell Ultra"}
MOST = 0.85  # of an efficiency
FEW = 20  # rows of a class, below which it takes the range of all precisions
SHARE = 0.9  # of unseen rows of a class that its range contains
# By how much later releases, not among rows, made experts faster in an unchanged layout: 17 to 30 % from 26.02 to 26.06,
# of which the range moves by a half.
PROGRESS = {"experts": 1.12}
_STEPS = 6  # of a fit


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
    def group(self) -> str:
        return self.kind if self.pp > 1 else "without a pipeline"

    @property
    def device(self) -> Device:
        return named({"H100": "H100-80GB"}.get(self.gpu, self.gpu))

    @property
    def products(self) -> tuple[str, str]:
        """What has one efficiency."""
        return GENERATIONS.get(self.gpu, self.gpu), self.precision

    def at(self, efficiency: float) -> Device:
        """Its GPU, on which products in its precision have an efficiency."""
        return at(self.device, PRECISIONS[self.precision], efficiency)


def at(device: Device, precision: str, efficiency: float, fitted_to: str = NOT_FITTED, lent: str = "") -> Device:
    own: dict[str, Any] = {"efficiency": efficiency, "fitted_to": fitted_to, "lent": lent}
    if precision == PRECISIONS["BF16"]:
        return replace(device, **own)
    return replace(device, precisions=tuple(replace(one, **own) if one.name == precision else one for one in device.precisions))


def read(folder: Path) -> list[Row]:
    """The rows; ends the program where there are none."""
    files = sorted(folder.glob("throughput*.json"))
    names = {field.name for field in fields(Row)}
    found = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    rows = [Row(**{name: value for name, value in row.items() if name in names}) for row in found]
    if not rows:
        raise SystemExit(f"{folder}: expected throughput*.json")
    dropless = {("DeepSeekV3", "H100")}  # of 25.09
    return [row for row in rows if row.release != "25.09" or row.kind == "dense" or (row.model, row.gpu) in dropless]


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
def _simulated(row: Row) -> tuple[float, float]:
    """Tokens per second and GPU on the device as it is, and the seconds of its busiest rank."""
    cluster, candidate = training(row)
    result = evaluate(cluster, candidate)
    assert isinstance(result, Result)
    return result.tokens_per_second / row.gpus, least_seconds(CandidateCosts(cluster, candidate))


def predicted(row: Row, efficiency: float | None = None) -> float:
    """Tokens per second and GPU; with another efficiency as many more as the busiest rank takes less for an iteration."""
    tokens, least = _simulated(row)
    if efficiency is None:
        return tokens
    cluster, candidate = training(row)
    device = replace(row.at(efficiency), memory=1e18)
    return tokens * least / least_seconds(CandidateCosts(replace(cluster, device=device), candidate))


@cache
def efficiency(rows: tuple[Row, ...]) -> float:
    """The one at which as many rows are predicted too fast as too slow."""
    found = 0.6
    for _ in range(_STEPS):
        found *= median(row.tokens / predicted(row, found) for row in rows)
        found = min(MOST, max(0.1, found))
    return round(found, 3)


def held_out(row: Row, rows: Sequence[Row], like: Callable[[Row], bool]) -> float | None:
    """Published over predicted tokens at the efficiency that rows which are ``like`` it want; None where there is none."""
    others = tuple(other for other in rows if other.precision == row.precision and like(other))
    return row.tokens / predicted(row, efficiency(others)) if others else None


def without(row: Row, rows: Sequence[Row], name: str) -> float | None:
    """From the rows of its products that have another release, or model."""
    return held_out(
        row, rows, lambda other: other.products == row.products and getattr(other, name) != getattr(row, name)
    ) or without_gpu(row, rows)


def without_release(row: Row, rows: Sequence[Row]) -> float | None:
    return without(row, rows, "release")


def without_model(row: Row, rows: Sequence[Row]) -> float | None:
    return without(row, rows, "model")


def without_gpu(row: Row, rows: Sequence[Row]) -> float | None:
    """As for a GPU of a generation whose efficiency is not fitted."""
    return held_out(row, rows, lambda other: other.products != row.products)


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


def contained(own: Sequence[Row], rows: Sequence[Row]) -> list[bool]:
    """Whether each of some rows lies within the range that the other releases would have given."""
    found = []
    for release in dict.fromkeys(row.release for row in own):
        others = learnt([row for row in rows if row.release != release], without_model, True)
        for row in (one for one in own if one.release == release):
            classes = {each.precision: each for each in others if each.kind == row.kind}
            each, ratio = classes.get(PRECISIONS[row.precision], classes[""]), without_release(row, rows)
            found.append(ratio is not None and each.low <= ratio <= each.high)
    return found


def tables(rows: Sequence[Row]) -> list[str]:
    """Those of docs/model.md: errors, and efficiencies."""
    errors, left_out = [], (without_release, without_model, without_gpu)
    for group in ("dense", "experts", "without a pipeline"):
        own = [row for row in rows if row.group == group]
        inside = contained(own, rows)
        shares = f"{sum(inside) / len(inside):.0%}", "", ""
        for share, name, found in zip(shares, ("release", "model", "generation of GPUs"), left_out, strict=True):
            off = sorted(abs(1 / ratio - 1) for row in own if (ratio := found(row, rows)) is not None)
            cells = [f"{len(off)} of {len(own)}", f"{median(off):.1%}", f"{off[int(0.9 * len(off))]:.1%}", share]
            errors.append([group, f"another {name}", *cells])
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
            own = tuple(row for row in rows if row.products == products)
            words = f"{len(own)} rows of Megatron-Bridge {', '.join(sorted({row.release for row in own}))}"
            share = efficiency(own)
            if whole and (other := fitted(named(own[0].device.name)) if own[0].device.name in REACHED else None):
                share, words = (
                    (share ** len(own) * other.efficiency) ** (1 / (len(own) + 1)),
                    f"{words}, and PipeOffload (arXiv 2503.01328)",
                )
            for gpu in [name for name, generation in GENERATIONS.items() if generation == products[0]] or [products[0]]:
                _write(at(replace(own[0], gpu=gpu).device, PRECISIONS[products[1]], round(share, 3), words))
        lend()
        for function in (training, _simulated, efficiency):
            function.cache_clear()


def lend() -> None:
    """Give every GPU the efficiencies that its file says another one lends it.

    Beyond its operations at the peak, a product takes as many bytes of the memory for each of them as on the other GPU.
    """
    for name in shipped():
        for precision in (WHOLE, *(one.name for one in named(name).precisions)):
            own, of = named(name), "" if precision == WHOLE else precision
            if lent := own.products(of).lent:
                other = named(lent)
                ridges = [gpu.products(of).peak / gpu.bandwidth for gpu in (own, other)]
                more = (1 / other.products(of).efficiency - 1) * ridges[0] / ridges[1]
                _write(at(own, precision, round(1 / (1 + more), 3), lent=lent))


def _write(device: Device) -> None:
    (DEVICES / f"{device.name}.json").write_text(device.to_json(), encoding="utf-8")
    named.cache_clear()


def _with_progress(row: Range) -> Range:
    if (more := PROGRESS.get(row.kind)) is None:
        return row
    low, high = round(more * row.low, 3), round(more * row.high, 3)
    return replace(row, low=low, high=high, source=f"{row.source}; times {more} for later ones")


def write_ranges(rows: Sequence[Row]) -> None:
    kept = [row for row in table() if "Megatron-Bridge" not in row.source]
    own = [*learnt(rows, without_model, True), *learnt(rows, without_gpu, False)]
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
