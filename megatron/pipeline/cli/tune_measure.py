"""``mpipe tune --measure``: time single layers and links on this machine, and keep that in a file that ``--gpu`` takes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron.pipeline.cli.arguments import file_of, whole_numbers
from megatron.pipeline.cli.memory import quietly, read_flags
from megatron.pipeline.cli.summary import wrote
from megatron.pipeline.flags.flags import neutral
from megatron.pipeline.flags.settings import Role, Settings
from megatron.pipeline.planner.costmodel import activations, device, origin
from megatron.pipeline.planner.costmodel.device import Device
from megatron.pipeline.planner.planning.document import naming
from megatron.pipeline.planner.view.table import plain_table
from megatron.pipeline.session import atomic
from megatron.pipeline.tune.measure import fit, outcome, processes, rank
from megatron.pipeline.tune.measure.rank import MeasureJob, Measurements, Timing
from megatron.pipeline.tune.measure.sizes import Size, candidates, dense, layer_flags, shape

# The flags with which any training is that of a model alone, which every rank has a copy of.
_ALONE = neutral(Role.LAYOUT, Role.CHUNKS, Role.SCHEDULE, Role.DETAILS, Role.MEMORY, Role.LENGTH, Role.DATA) | {
    "pipeline_schedule": "1f1b",
    "mtp_num_layers": None,
    "micro_batch_size": 1,
    "global_batch_size": None,
    "train_iters": 1,
    "lr": 1.0,
    "min_lr": 0.0,
    "lr_warmup_init": 0.0,
    "tokenizer_type": "NullTokenizer",
    "mock_data": True,
}

_RANKS_PER_CORE = 8
_TENSOR, _SAMPLES = (1, 2, 4, 8), (1, 2, 4)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``--measure`` that the search has no use for; ``--gpu``, ``--output`` and the model's it shares."""
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--measure",
        action="store_true",
        help="time a layer of the model and the links of this machine, and write that to -o FILE.json, for --gpu; under "
        "torchrun or srun, those between nodes too",
    )
    group.add_argument("--ranks", type=int, metavar="N", help="processes that measure at once (all GPUs; without one, all cores)")
    group.add_argument(
        "--tensor",
        type=whole_numbers,
        metavar="1,2,4,8",
        help="tensor-parallel sizes: those that do not divide the model are left out (1,2,4,8)",
    )
    group.add_argument(
        "--rehearsed",
        type=file_of(partial(naming, read=origin.read)),
        metavar="FILE",
        help="costs.json of a rehearsal (mpipe rehearse) of this model: its stages' seconds count, and no layer is timed here; "
        "--tensor, --expert and --micro-batch-sizes, one number each, are those that it had (those of the model's flags)",
    )
    group.add_argument("--micro-batch-sizes", type=whole_numbers, metavar="1,2,4", help="samples at once (1,2,4)")


def run(options: argparse.Namespace) -> None:
    """Measure, write the file and print a table.

    Args:
        options: with ``output``, ``gpu`` (the device whose links and peak count where they cannot be measured, or None),
            ``flags`` of ``pretrain_gpt.py``, and what ``add_flags`` adds.

    Raises:
        ValueError: wrong options or flags, or a file that this cannot be added to.
        SystemExit: with one line, where a rank dies, fails or hangs. Nothing is written.
    """
    if Path(options.output or "").suffix != ".json":
        raise ValueError(
            f"--measure writes a file for --gpu: give -o FILE.json{f', not {options.output}' if options.output else ''}"
        )
    path = Path(options.output)
    base = device.read(options.gpu) if options.gpu else None
    before = outcome.existing(path)
    with quietly():
        model, ranks = _model(options.flags), _ranks(options.ranks)
    if ranks == 1 and base is None:
        raise ValueError(outcome.NO_LINKS)
    args, known = _rehearsed(options, model) if options.rehearsed else (dense(model), None)
    if known is None and args is not model:
        _say(f"experts are measured as one MLP of the width that a token passes, {args.ffn_hidden_size}")
    sizes = () if known else tuple(candidates(args, options.tensor or _TENSOR, options.micro_batch_sizes or _SAMPLES))
    found = _found(MeasureJob(dense(args), sizes), ranks)
    if found is None:
        return
    if known:
        found = replace(found, timings=(known,))
    measured = outcome.make(found, args, base, " ".join(["mpipe", *map(shlex.quote, sys.argv[1:])]))
    if known:  # times in FP8 are those of a machine of another name: they never join a file of times in 16 bits
        measured = replace(measured, name=" ".join([measured.name, *origin.quantized(options.rehearsed.of)]))
    kept = outcome.merged(before, measured, path)
    atomic.write_text(path, kept.to_json())
    print(text(found, args, measured))
    wrote(options.output)


def text(found: Measurements, args: Settings, measured: Device) -> str:
    """Text about a measurement: times, and how well the formulas agree with them."""
    heads = ("tensor", "samples", "F ms", "B ms", "W ms", "predicted", "activation MiB", "predicted")
    rows = []
    for timing in found.timings:
        whole, alone = shape(args, timing.size), shape(layer_flags(args, timing.size), timing.size)
        total = timing.seconds.total
        rows.append(
            [
                str(timing.size.tensor),
                str(timing.size.microbatch),
                *(f"{1000 * seconds:.3f}" for seconds in timing.seconds),
                f"{fit.ideal_seconds(whole, measured) / measured.efficiency / total:.2f}",
                f"{timing.activation / 2**20:.2f}",
                f"{activations.layer_activation(alone) / timing.activation:.2f}",
            ]
        )
    speeds = (
        f"{measured.name}: {measured.peak / 1e12:.4g} TFLOP/s, of which {measured.efficiency:.0%} in layers; memory "
        f"{measured.memory / 2**30:.4g} GiB at {measured.bandwidth / 1e9:.4g} GB/s; host copies "
        f"{measured.to_host / 1e9:.4g} and {measured.to_device / 1e9:.4g} GB/s"
    )
    links = [
        f"{name:<8} {1e6 * link.latency:.4g} us, {link.bandwidth / 1e9:.4g} GB/s"
        + ("" if name in found.links else ", not measured")
        for name, link in (("within", measured.within), ("hop", measured.hop), ("between", measured.between))
    ]
    unknown = ", not measured" if found.beside_communication is None else ""
    links.append(f"products take {measured.beside_communication:.3g} times as long beside communication{unknown}")
    left_out = [f"memory is too small for {size}" for size in found.too_large]
    note = "predicted: times of the formulas at that efficiency, and bytes that they count, over what was measured"
    return "\n".join([speeds, *links, "", plain_table(heads, rows), "", note, *left_out])


def _model(flags: list[str]) -> Settings:
    from megatron.pipeline.flags.support import check_trained
    from megatron.pipeline.flags.validation import validate

    args = read_flags(flags, _ALONE)
    check_trained(args)
    return validate(args, 1)


def _rehearsed(options: argparse.Namespace, model: Settings) -> tuple[Settings, Timing]:
    """A layer's times from ``--rehearsed``, and the model with the ranks that shared experts.

    Raises:
        ValueError: the file does not have them, or the size is not one.
    """
    for name in ("tensor", "expert", "micro_batch_sizes"):
        if len(getattr(options, name) or (1,)) > 1:
            raise ValueError(f"--rehearsed is of one size: give one number with --{name.replace('_', '-')}")
    own = read_flags(options.flags)  # those of the rehearsal, sizes included
    [tensor] = options.tensor or (own.tensor_model_parallel_size,)
    [expert] = options.expert or (own.expert_model_parallel_size,)
    [samples] = options.micro_batch_sizes or (own.micro_batch_size or 1,)
    if expert > 1 and not model.num_experts:
        raise ValueError(f"--expert {expert} is for a model with --num-experts: leave it out")
    candidates(model, (tensor,), (samples,))
    costs, of = options.rehearsed
    if model.num_experts and tensor > 1:
        raise ValueError(
            f"--rehearsed with experts and --tensor {tensor}: a costs file does not say whether the experts were cut, too: "
            "rehearse one tensor-parallel rank"
        )
    model |= {"expert_model_parallel_size": expert if model.num_experts else 1}
    try:
        origin.check(of, model, tensor, model.expert_model_parallel_size, samples)
        return model, outcome.of_rehearsal(costs, model.num_layers, Size(tensor, samples))
    except ValueError as error:
        raise ValueError(f"--rehearsed: {error}") from None


def _ranks(wanted: int | None) -> int:
    """Number of processes that measure: those that torchrun or srun has started, or those that are to be started here."""
    import torch

    if "RANK" in os.environ:
        if wanted is not None:
            raise ValueError(f"--ranks {wanted}: torchrun or srun has started all ranks; leave --ranks out")
        return int(os.environ.get("WORLD_SIZE", "1"))
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    most, why = (gpus, "one for each GPU") if gpus else (_RANKS_PER_CORE * cores, f"{_RANKS_PER_CORE} for each of {cores} cores")
    if wanted is not None and not 1 <= wanted <= most:
        raise ValueError(f"--ranks {wanted}: give from 1 to {most}, {why}")
    return wanted or gpus or cores


def _found(job: MeasureJob, ranks: int) -> Measurements | None:
    """The measurements of all ranks on the process that prints them; None on other ranks."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        if "RANK" in os.environ:
            said: list[str] = []

            def tell(at: str) -> None:
                if first and said[-1:] != [at]:
                    said.append(at)
                    _say(at)

            found = rank.run(job, tell)
            return found if first else None
        return processes.run(rank.run, job, ranks, _say)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise SystemExit(f"mpipe tune --measure: {' '.join(str(error).split())[:500]}; nothing was written") from None


def _say(at: str) -> None:
    print(f"mpipe tune --measure: {at}", file=sys.stderr, flush=True)
