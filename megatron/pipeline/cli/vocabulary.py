"""``mpipe vocabulary``: what sharding the vocabulary layers gains, by size of the vocabulary, from a cost model of a GPT."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from megatron.pipeline.cli.arguments import Commands, add_command, count, report_flags, size_flags
from megatron.pipeline.cli.summary import check_output, write
from megatron.pipeline.costmodel.device import Device, named
from megatron.pipeline.costmodel.estimate import DURING_COLLECTIVES, estimate
from megatron.pipeline.costmodel.parameters import parameters
from megatron.pipeline.planning.request import MOST_PASSES, Request
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.names import counted
from megatron.pipeline.schedule.core.passes import Vocabulary
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.problem import Objective
from megatron.pipeline.shape.balance import balanced_layers
from megatron.pipeline.shape.gpt import STATE_BYTES, Shape, output_in_layers, training_operations
from megatron.pipeline.view.table import plain_table

# How the vocabulary is sharded, and whether layers are redistributed, by the name in the table.
METHODS: dict[str, tuple[Vocabulary | None, bool]] = {
    "off": (None, False),
    "redistribution": (None, True),
    **{str(vocabulary): (vocabulary, False) for vocabulary in Vocabulary},
}
DEVICE = "A100-80GB"
MODEL = """\
MFU: operations of the model's matrix products, without recomputation, over what all ranks could do in the planned makespan.
Time: products at {efficiency:g} of {peak:g} TFLOP/s, all other kernels at as much of {bandwidth:g} GB/s, {latency:g} ms to begin
a pass, messages and collectives at {link:g} GB/s; with 1 and 2, layers take {slower:.0%} longer during these (docs/model.md).
Memory: {state:g} bytes a parameter, and activations in 16 bits with fused attention.
off: layers spread evenly. redistribution: so that the heaviest rank is lightest; in brackets the layers of the last stage."""


def add(commands: Commands) -> None:
    device = named(DEVICE)
    shape_of = "--pp 8 --microbatches 128 --layers 32 --hidden 3072 --heads 24 --seq 2048"
    parser = add_command(
        commands,
        "vocabulary",
        "compare what --vocab-parallel and --layer-redistribution gain, over sizes of the vocabulary",
        run,
        f"mpipe vocabulary {shape_of}",
        f"mpipe vocabulary {shape_of} --schedule zb-v --sizes 128k,256k --tied",
        epilog=" ".join(_model(device, STATE_BYTES).split()),
        parents=[size_flags(), report_flags("one JSON object", "write there instead of to the terminal: .json or .txt")],
    )
    shape = parser.add_argument
    for name, metavar, what in (
        ("layers", "L", "transformer layers"),
        ("hidden", "H", "width of the model; its MLP is four times as wide"),
        ("heads", "A", "attention heads"),
        ("seq", "S", "tokens of a sample"),
    ):
        shape(f"--{name}", required=True, type=count, metavar=metavar, help=what)
    shape("--micro-batch-size", type=count, default=1, metavar="B", help="samples of a microbatch (default: 1)")
    shape("--schedule", default="1f1b", metavar="NAME", help="any that trains without slices (default: 1f1b)")
    shape("--sizes", type=_sizes, default=_sizes("32k,64k,128k,256k"), metavar="V,..", help="rows (default: 32k,64k,128k,256k)")
    shape("--tied", action="store_true", help="embedding and output layer share their weights")
    for name, value, what in (
        ("peak", device.peak / 1e12, "TFLOP/s of a GPU in 16 bits"),
        ("efficiency", device.efficiency, "share of it that matrix products reach, and of the memory's bandwidth that others do"),
        ("bandwidth", device.bandwidth / 1e9, "GB/s of its memory"),
        ("link", device.hop.bandwidth / 1e9, "GB/s to another rank"),
        ("state-bytes", STATE_BYTES, "bytes of a parameter with its gradient and its optimizer's state"),
    ):
        shape(f"--{name}", type=_number, default=value, metavar="X", help=f"{what} (default: {value:g})")


def run(options: argparse.Namespace) -> None:
    check_output(options)
    if options.schedule == families.AUTO:
        raise ValueError(
            f"--schedule {families.AUTO} would compare different schedules: name one without slices, such as 1f1b or zb-v"
        )
    if options.layers * options.pp > MOST_PASSES:
        raise ValueError(f"{options.layers} layers are too many for {options.pp} ranks; take fewer")
    given = {"peak": options.peak * 1e12, "efficiency": options.efficiency, "bandwidth": options.bandwidth * 1e9}
    device = replace(named(DEVICE), **given).with_links(options.link * 1e9)
    shape = Shape.plain(options.layers, options.hidden, options.heads, options.seq, 1, options.micro_batch_size)
    rows = [_row(options, device, name, replace(shape, vocabulary=size)) for name in METHODS for size in options.sizes]
    contents = {
        "schedule": options.schedule,
        "pp": options.pp,
        "microbatches": options.microbatches,
        "device": asdict(device),
        "state_bytes": options.state_bytes,
        "rows": rows,
    }
    write(contents, lambda: _text(options, rows, device), options)


def _row(options: argparse.Namespace, device: Device, method: str, shape: Shape) -> dict[str, Any]:
    """One method at one size, planned and simulated.

    Raises:
        ValueError: the schedule is unknown or does not fit, or there are too few layers.
    """
    vocabulary, redistributes = METHODS[method]

    def layers_on(placement: Placement) -> list[int]:
        extra = {placement.last_stage: output_in_layers(shape)} if redistributes else {}
        return balanced_layers(shape.layers, placement, extra)

    planned = Request(
        options.schedule,
        options.pp,
        options.microbatches,
        lambda placement: estimate(shape, placement, layers_on(placement), device, vocabulary),
        objective=Objective.MAKESPAN,
        vocabulary=vocabulary,
        bounded=True,
    ).plan()
    placement, timeline = planned.schedule.placement, planned.timeline
    layers = layers_on(placement)
    counts = parameters(shape, placement, layers, vocabulary, options.tied)
    states = [options.state_bytes * count.total for count in counts]
    return {
        "method": method,
        "vocabulary": shape.vocabulary,
        "layers": layers,
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble_rate,
        "mfu": training_operations(shape) * options.microbatches / (timeline.makespan * options.pp * device.peak),
        "parameter_bytes": states,
        "activation_bytes": list(planned.peaks),
        "peak_bytes": max(map(sum, zip(states, planned.peaks, strict=True))),
    }


def _text(options: argparse.Namespace, rows: list[dict[str, Any]], device: Device) -> str:
    size = f"{counted(options.pp, 'rank')}, {counted(options.microbatches, 'microbatch')}"
    title = (
        f"{options.schedule}: {size} of {options.micro_batch_size} x {options.seq} tokens; {options.layers} layers, "
        f"hidden size {options.hidden}"
    )

    def table(what: str, cell: Callable[[dict[str, Any]], str]) -> str:
        heads = [what, *map(_name, options.sizes)]
        return plain_table(heads, [[method, *(cell(row) for row in rows if row["method"] == method)] for method in METHODS])

    def share(row: dict[str, Any]) -> str:
        last = f" ({row['layers'][-1]})" if row["method"] == "redistribution" else ""
        return f"{row['mfu']:.1%}{last}"

    tables = table("MFU", share), table("GiB of the fullest rank", lambda row: f"{row['peak_bytes'] / 2**30:.2f}")
    return "\n\n".join([title, *tables, _model(device, options.state_bytes)])


def _model(device: Device, state: float) -> str:
    return MODEL.format(
        efficiency=device.efficiency,
        peak=device.peak / 1e12,
        bandwidth=device.bandwidth / 1e9,
        latency=device.latency * 1e3,
        slower=DURING_COLLECTIVES - 1,
        link=device.hop.bandwidth / 1e9,
        state=state,
    )


def _name(size: int) -> str:
    return f"{size // 1024}k" if size % 1024 == 0 else str(size)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e12:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _sizes(text: str) -> list[int]:
    """An argument type for ``32k,50304``; k is 1024."""
    sizes = [item.strip() for item in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,8}k?", size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of rows such as 32k,64k or 50304, with k for 1024")
    return [int(size[:-1]) * 1024 if size.endswith("k") else int(size) for size in sizes]
