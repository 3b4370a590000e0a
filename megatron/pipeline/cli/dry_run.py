"""``mpipe launch --dry-run``: will this start, and what will it need? Flags and files are read; no rank is started."""

from __future__ import annotations

import json
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.pipeline.cli import memory
from megatron.pipeline.cli.gpu import named_gpu
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.flags import actions
from megatron.pipeline.flags.importers.upstream import named
from megatron.pipeline.flags.packages import absent
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.planner import STOCK, Device, Variant, families, ranges, rank_memory
from megatron.pipeline.tune.candidate import Candidate, Cluster
from megatron.pipeline.tune.iteration import seconds_of

FITS, FULL, REFUSED, MISSING = range(4)  # exit codes
_SAID = ("it starts", "it starts, and is not predicted to fit", "", "it does not start here")


@dataclass
class DryRun:
    """Outcome of a start, before it; fields are those of ``--json``.

    Attributes:
        refused: why it does not start, in one line; None where it does.
        left_out: a line for each flag that ``--adapt`` leaves out.
        missing: packages that are not here.
    """

    refused: str | None = None
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    gpus: int | None = None
    gpu_memory: float | None = None
    fits: bool | None = None
    memory: dict[str, Any] | None = None
    gpu: str | None = None
    iteration_seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_range: tuple[float, float] | None = None

    @property
    def code(self) -> int:
        return REFUSED if self.refused else MISSING if self.missing else FITS if self.fits else FULL


def run(options: Namespace, torchrun: Sequence[str], tokens: Sequence[str]) -> int:
    """Answer for a script's command line; returns the exit code.

    Args:
        options: of ``mpipe launch``.
        torchrun: its options, which say how many ranks there are.
        tokens: the script, and its flags; or flags alone.

    Raises:
        ValueError: a GPU is unknown, or there is no script.
    """
    script = Path(tokens[0]) if tokens and tokens[0].endswith(".py") else None
    if script and not script.is_file():
        raise ValueError(f"there is no script {script}")
    world, rest = _world(torchrun)
    flags = list(tokens[1:]) if script else [*rest, *tokens]
    gpu, answer = named_gpu(options), DryRun()
    prediction = None
    try:
        prediction = _read(answer, flags, options.world_size or world)
        answer.missing = absent(prediction.args.transformer_impl, script and script.resolve().parent)
        _predict(answer, prediction, gpu, options.gpu_memory)
    except ValueError as error:
        answer.refused = " ".join(str(error).split())
    if options.json:
        print(json.dumps(vars(answer) | {"starts": answer.code in (FITS, FULL)}))
    elif prediction is None or answer.refused:
        print(f"mpipe: launch: {answer.refused}", file=sys.stderr)
    else:
        print(_text(answer, prediction))
    return answer.code


def _world(torchrun: Sequence[str]) -> tuple[int | None, list[str]]:
    """Ranks that torchrun would start, where its options say so, and what is none of these."""
    sizes: dict[str, int] = {}
    rest, words = [], iter(torchrun)
    for word in words:
        found = re.fullmatch(r"--(nnodes|nproc[-_]per[-_]node)(?:=(.*))?", word)
        value = found and (found[2] or next(words, ""))
        if not found:
            rest.append(word)
        elif value and value.isdecimal():
            sizes[found[1][:2]] = int(value)
    return (sizes["np"] * sizes.get("nn", 1) if "np" in sizes else None), rest


def _read(answer: DryRun, flags: list[str], world: int | None) -> memory.Prediction:
    """Plan of a start, and what it would leave out.

    Raises:
        ValueError: it would not start.
    """
    with memory.quietly():
        from megatron.pipeline.launch.adapt import adapt
        from megatron.pipeline.launch.check import check_flags, untested
        from megatron.pipeline.model import te_graphs, te_linear

        raw = parse(flags, predicts=True)
        schedule = {"pipeline_schedule": raw.pipeline_schedule or STOCK}
        args, changes = named(raw) | schedule, schedule
        if args.adapt:
            without, answer.left_out = adapt(args, lambda name: actions()[name].default if name in actions() else None)
            args |= without
            changes |= {name: value for name, value in without.items() if name in actions()}
        check_flags(args, gpu=True, crowded=False, engine=te_linear.release() or te_graphs.OLDEST)
        answer.warnings = untested(args, named(parse([], predicts=True)))
        prediction = memory.predicted(flags, world_size=world, changes=changes)
    gone = " ".join(answer.left_out)
    notes = [note for note in prediction.args.not_modelled if note.partition(":")[0] not in gone]
    answer.warnings += [f"not in this prediction: {note}" for note in notes]
    return prediction


def _predict(answer: DryRun, prediction: memory.Prediction, gpu: Device | None, given: float | None) -> None:
    """Memory of every rank, and seconds of an iteration on a GPU that is named."""
    size = given * rank_memory.GIB if given else gpu.memory if gpu else 80.0 * rank_memory.GIB
    model = describe(prediction.args)
    answer.gpus, answer.gpu_memory, answer.memory = model.gpus, size, memory.report(prediction)
    answer.fits = prediction.fullest.total <= rank_memory.usable(size)
    schedule = prediction.schedule
    if gpu is None or schedule.name not in families.FAMILIES:  # a file's
        return
    answer.gpu = gpu.name
    batch = prediction.microbatches * prediction.args.micro_batch_size * prediction.args.data_parallel_size
    variant = Variant(schedule.name, schedule.placement.chunks)
    candidate = Candidate(prediction.args | {"global_batch_size": batch}, {}, variant, tuple(prediction.layers))
    cluster = Cluster(gpu, model.gpus, gpu.node(model.gpus))
    answer.iteration_seconds = seconds = seconds_of(cluster, candidate, schedule)
    answer.tokens_per_second = candidate.tokens / seconds
    answer.tokens_per_second_range = ranges.learnt("throughput", shape_of(prediction.args), gpu).of(candidate.tokens / seconds)


def _text(answer: DryRun, prediction: memory.Prediction) -> str:
    lines = [*answer.left_out, *answer.warnings]
    quoted = " ".join(map(shlex.quote, answer.missing))
    lines += [f"not installed here: {' '.join(answer.missing)}: pip install {quoted}"] if quoted else []
    fullest, size = prediction.fullest.total / rank_memory.GIB, (answer.gpu_memory or 0) / rank_memory.GIB
    need = f"the fullest rank needs {fullest:.1f} GiB of {size:.4g}"
    verdict = "fits" if answer.fits else "does not fit: mpipe memory with these flags says what would"
    lines += [memory.title(prediction), "", memory.table(prediction), "", f"{need}: {verdict}"]
    if answer.iteration_seconds and answer.tokens_per_second_range:
        likely = ranges.in_words(*answer.tokens_per_second_range, "tokens/s")
        lines.append(f"an iteration takes {answer.iteration_seconds:.3g} s on {answer.gpus} x {answer.gpu}: likely {likely}")
    return "\n".join([*lines, f"{_SAID[answer.code]}; nothing was started"])
