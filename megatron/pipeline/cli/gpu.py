"""The GPU that a prediction is for: ``--gpu`` and ``--gpu-from``."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial

from megatron.pipeline.cli.arguments import Parser
from megatron.pipeline.flags.flag_types import count
from megatron.pipeline.flags.flags import actions
from megatron.pipeline.model.description import describe
from megatron.pipeline.planner import Device, device, document, origin, reading


def add_gpu_flags(parser: Parser) -> None:
    """The flags of both."""
    parser.add_argument("--gpu", metavar="NAME|FILE", help=f"{', '.join(device.shipped())}, or a file of mpipe tune --gpu-from")
    parser.flag("--gpu-from", "the GPU on which a run of this model measured costs.json (mpipe rehearse, --pipeline-costs "
        "profile): its F, B and W count, all else is of --gpu, by default of the GPU that the file names",
        partial(document.naming, read=origin.read), metavar="FILE")  # fmt: skip
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="GPUs that NVLink connects (those of the GPU's file)")


def check_given(options: Namespace, flags: Namespace, *further: str) -> None:
    """Refuse a prediction that lacks its GPU, or flags of the training: all that it lacks at once.

    Args:
        flags: as they were read.
        further: names of others that it needs, of ``options`` or of ``flags``.

    Raises:
        ValueError: says what to give.
    """
    from megatron.pipeline.flags.validation import missing

    lacking = ["--gpus N"] * ("gpus" in further and not options.gpus)
    lacking += ["--gpu NAME"] * (not options.gpu and options.gpu_from is None)
    lacking += missing(flags, *(name for name in further if name in vars(flags)))
    if lacking:
        known = f"; known GPUs are {', '.join(device.shipped())} and files of --gpu-from" if "--gpu NAME" in lacking else ""
        raise ValueError(f"give {', '.join(lacking[:-1])}{' and ' * (len(lacking) > 1)}{lacking[-1]}{known}")


def named_gpu(options: Namespace) -> Device | None:
    """The GPU of ``--gpu``, or the one that the file of ``--gpu-from`` names; None where neither is given.

    Raises:
        ValueError: there is none of this name.
    """
    if options.gpu:
        with reading.NamedErrors("--gpu:"):
            known = device.read(options.gpu)
        if not options.gpu.endswith(".json") and options.gpu.lower() != known.name.lower():
            print(f"mpipe: --gpu {options.gpu} is {known.name}", file=sys.stderr)
        return known
    if options.gpu_from is None:
        return None
    found = device.of_maker(options.gpu_from.gpu)
    if found is None:
        where = f"was measured on {options.gpu_from.gpu}" if options.gpu_from.gpu else "does not name a GPU"
        raise ValueError(
            f"--gpu-from: the file {where}: say whose memory and links to take with --gpu {' or '.join(device.shipped())}"
        )
    return found


def measured_engine(options: Namespace) -> str | None:
    """The ``--transformer-impl`` that the file of ``--gpu-from`` measured: of a prediction whose flags name none."""
    engine = options.gpu_from.of.get("transformer_impl") if options.gpu_from else None
    return engine if engine in (actions()["transformer_impl"].choices or ()) else None


def measured_gpu(gpu: Device, options: Namespace, args: Namespace) -> Device:
    """The same with the times of ``--gpu-from``, if that is given, and a line on stderr that says what was taken from it.

    Args:
        args: flags of the model after ``validate``, with ``padded_vocab_size``.

    Raises:
        ValueError: the file has no times of its layers.
    """
    if options.gpu_from is None:
        return gpu
    with reading.NamedErrors("--gpu-from:"):
        found, took, predicted = origin.measured(gpu, describe(args), options.gpu_from)
    passes = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in zip("FBW", took, strict=True))
    print(
        f"mpipe: from --gpu-from: a layer takes {passes}, together {took.total / predicted.total:.3g} times as long as by the "
        f"formulas: {gpu.name} with an efficiency of {found.efficiency:.3g}, not {gpu.efficiency:.3g}",
        file=sys.stderr,
    )
    return found
