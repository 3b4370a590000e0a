"""``mpipe check``: do two layouts or schedules train the same? A short training under both, compared gradient by gradient.

It reads its command line itself, since most of that is for a training.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from megatron.pipeline.cli.arguments import Commands, Parser, complain, dashes_missing, own_parser
from megatron.pipeline.cli.memory import quietly
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.flag_types import positive_int
from megatron.pipeline.flags.flags import given, neutral
from megatron.pipeline.flags.packages import refuse_without_torch
from megatron.pipeline.flags.settings import Flags, Role
from megatron.pipeline.planner import STOCK, counted, view

NAME = "check"
_HELP = "train a few iterations in two layouts or under two schedules, and say where the first difference is"
_EPILOG = """\
FLAGS are those of a training (pretrain_gpt.py --help). The reference is megatron-core's own schedule on one rank (tensor,
pipeline, context and expert parallelism 1), or what --against says. Both start with the same weights, have the same data, and
compute in float32. The exit status is 0 where all numbers are equal, bit for bit or within what sums in another order explain,
1 where not, and 2 for wrong flags."""
_EXAMPLES = [
    "mpipe check --shrink -- --config configs/llama3/70B.yaml --pipeline-model-parallel-size 4 --pipeline-schedule zb-v",
    "mpipe check --against '--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2' -- FLAGS",
]
_DATA = ("data_path", "train_data_path", "mock_data")
_SEED, _ROWS = 1234, 2**15  # of our own data: of its random tokens, and its vocabulary where the flags say none
_SHOWN, _SILENCE = 8, 600.0  # gradients that are listed; seconds without a word from a rank


class Side(NamedTuple):
    """One of the two trainings.

    Attributes:
        args: parsed flags.
        whole: the same, completed.
    """

    name: str
    args: Flags
    whole: Namespace
    ranks: int

    @property
    def sizes(self) -> str:
        sizes = {"tensor": "tensor_model", "pipeline": "pipeline_model", "context": "context", "expert": "expert_model"}
        found = {word: getattr(self.whole, f"{name}_parallel_size") for word, name in sizes.items()}
        found["data"] = self.whole.data_parallel_size
        cut = " x ".join(f"{size} {word}" for word, size in found.items() if size > 1)
        schedule = "megatron-core's own schedule" if self.whole.pipeline.schedule == STOCK else self.whole.pipeline.schedule
        return f"{schedule} on {counted(self.ranks, 'rank')}" + (f" ({cut} parallel)" if cut else "")


class Job(NamedTuple):
    """Work of the ranks of one side; see ``trainer/gradients.py`` for the folders."""

    args: Flags
    folder: Path
    start: Path | None


def add(commands: Commands) -> None:
    """For the list of commands."""
    commands.add_parser(NAME, help=_HELP, add_help=False)


def main(arguments: Sequence[str]) -> int:
    """Train under both and print what differs; returns the exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        at = arguments.index("--") if "--" in arguments else len(arguments)
        own, others = parser().parse_known_args(list(_joined(arguments[:at])))
        flags = arguments[at + 1 :]
        if others:
            raise ValueError(dashes_missing(NAME, others))
        if not flags:
            raise ValueError("which training? mpipe check -- FLAGS")
        refuse_without_torch()
        with tempfile.TemporaryDirectory(prefix="check-") as folder, quietly():
            from megatron.pipeline import patches

            patches.install()
            reference, checked, words = sides(own, parse(flags), Path(folder))
            print("\n".join(words), flush=True)
            text, equal = compare(reference, checked, Path(folder), _run)
            print(f"\n{text}")
            return int(not equal)
    except (ValueError, RuntimeError) as error:
        code = complain(f"{NAME}: {error}")
        return code if isinstance(error, ValueError) else 1


def _joined(tokens: Sequence[str]) -> Iterator[str]:
    """The tokens, with the value of ``--against`` joined to it: argparse would take a single flag for one of its own."""
    rest = iter(tokens)
    for token in rest:
        yield f"{token}={next(rest, '')}" if token == "--against" else token


def sides(own: Namespace, args: Flags, folder: Path) -> tuple[Side, Side, list[str]]:
    """The reference, the training that is checked, and lines about both.

    Args:
        own: this command's own flags.
        args: parsed flags of the training.
        folder: for data, if the training has none of its own.

    Raises:
        ValueError: the flags are wrong, or cannot be compared.
    """
    import torch

    from megatron.pipeline.flags.facts import cautions
    from megatron.pipeline.flags.shrink import comparable, fewer_microbatches, fewer_ranks, shrunk, with_reference
    from megatron.pipeline.flags.validation import validate
    from megatron.pipeline.flags.validation_rehearsal import least_ranks
    from megatron.pipeline.model.layout import stage_layers
    from megatron.pipeline.session.planning import plan_pipeline
    from megatron.pipeline.trainer.program import prepared

    if changed := given(args, "label_smoothing", "z_loss", "vocab_mask_padding"):
        raise ValueError(f"{changed[0]} changes the loss, and megatron-core's own layers have no such loss: leave it out")
    layout = parse(["--pipeline-schedule", STOCK, *shlex.split(own.against)])
    tensor = args.tensor_model_parallel_size
    args = fewer_ranks(args) if own.shrink and not own.ranks else args
    ranks = [own.ranks or least_ranks(args), least_ranks(with_reference(args, layout)[1])]
    gpus = torch.cuda.device_count() >= max(ranks)
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    args, aside = comparable(args, own.iterations, gpus)
    if args.tensor_model_parallel_size < tensor:
        aside.append(f"TP {args.tensor_model_parallel_size} in place of {tensor}, which --ranks N keeps")
    has_data = any(getattr(args, name) for name in _DATA) and not own.shrink
    if not has_data:
        own_data = {"data_path": [str(folder / "data")], "split": "100,0,0", "mock_data": False}
        tokens = {"tokenizer_type": "NullTokenizer", "vocab_size": args.vocab_size or _ROWS}
        args |= neutral(Role.DATA) | own_data | tokens
    whole = validate(args, ranks[0])
    found = cautions(whole)
    model_words = _model(whole)
    if own.shrink:
        args = fewer_microbatches(args, whole.data_parallel_size)
        whole = validate(args, ranks[0])
        pipeline = plan_pipeline(whole, evaluates=False)
        stages = stage_layers(whole, pipeline.placement)
        args = shrunk(args | {"pipeline_schedule": pipeline.name}, whole, stages, pipeline.plans.splits)
        model_words = f"{_model(validate(args, ranks[0]))}; whole: {model_words}"
    if not has_data:
        _write_data(args, whole.global_batch_size * (own.iterations + 1))
    args, other = with_reference(args | {"data_cache_path": str(folder / "cache")}, layout)
    pipeline = prepared(args, ranks[0])[2]
    alone = ranks == [one.pipeline_model_parallel_size for one in (args, other)] and pipeline.plans.splits == 1
    if (args.hidden_dropout or args.attention_dropout) and not alone:
        aside.append("no dropout, whose masks follow from tensor, context and data-parallel ranks and from slices")
        args, other = (one | {"hidden_dropout": 0.0, "attention_dropout": 0.0} for one in (args, other))
    both = [
        Side(name, one, prepared(one, number)[0], number)
        for name, one, number in (("reference", other, ranks[1]), ("checked", args, ranks[0]))
    ]
    lines = [f"checked:   {both[1].sizes}", f"reference: {both[0].sizes}", f"model:     {model_words}"]
    lines += [f"set aside: {'; '.join(aside)}"] if aside else []
    return both[0], both[1], [*lines, *(f"WARNING: {caution}" for caution in found)]


def rank(job: Job, tell: Callable[[str], object]) -> None:
    """One rank of one of the two trainings, whose words go to a file."""
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with (job.folder / f"log-{number}.txt").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    from megatron.pipeline import patches

    patches.install()
    from megatron.pipeline.trainer.gradients import watching
    from megatron.pipeline.trainer.program import prepared, start

    tell("start-up")
    args, tokenizer, pipeline = prepared(job.args, ranks)
    watch = watching(job.folder, job.start, tell)
    # Errors go to who has started the ranks, which also ends them.
    start(args, tokenizer, pipeline, number, ranks, guard=lambda *_, **__: nullcontext(), watch=watch)


def _run(job: Job, side: Side) -> None:
    """Start the ranks of one side, and wait for their end.

    Raises:
        RuntimeError: one died, failed or hung; all have been ended.
    """
    from megatron.pipeline.tune import processes

    try:
        processes.run(rank, job, side.ranks, _SILENCE)
    except processes.RankFailed as error:
        raise RuntimeError(f"{side.name} ({side.sizes}): {error}") from None


def compare(reference: Side, checked: Side, folder: Path, run: Callable[[Job, Side], object]) -> tuple[str, bool]:
    """Words about what differs, and whether both are equal.

    Args:
        folder: for what both write.
        run: has every rank of a side do its work.
    """
    from megatron.pipeline.trainer.gradient_files import compared

    metrics: list[list[dict[str, Any]]] = []
    for side in (reference, checked):
        here = folder / side.name
        here.mkdir()
        file = here / "metrics.jsonl"
        run(Job(side.args | {"metrics": str(file)}, here, None if side is reference else folder / reference.name), side)
        metrics.append([json.loads(line) for line in file.read_text().splitlines()])
    low = checked.args.bf16 or checked.args.fp16
    found = list(compared(folder / reference.name, folder / checked.name, list(zip(*metrics, strict=True)), low))
    return "\n".join([_table(found, metrics[0]), "", *_verdict(found)]), not any(one.beyond for one in found)


def _table(found: list[Any], metrics: list[dict[str, Any]]) -> str:
    heads = ["iteration", "loss", "differs by", "gradient norm", "differs by", "gradients differ by", "tolerance", "most in"]
    rows = []
    for one, numbers in zip(found, metrics, strict=True):
        most = max(one.gradients, key=lambda gradient: gradient.relative)
        loss, norm = (_size(number.relative) for number in one.numbers)
        cells = [f"{numbers['loss']:.6g}", loss, f"{numbers['grad_norm'] or 0:.6g}", norm, _size(most.relative)]
        rows.append([str(one.number), *cells, f"{one.tolerance:.0e}", most.what if most.absolute else ""])
    return view.plain_table(heads, rows, words=1)


def _verdict(found: list[Any]) -> list[str]:
    """Words for "all is equal", or for the first differences: a line for each of the first ``_SHOWN``."""
    first = next((one for one in found if one.beyond), None)
    if first is None:
        gradients = [gradient for one in found for gradient in one.gradients]
        most = max(gradients, key=lambda gradient: gradient.relative)
        norm = max(one.numbers[1].relative for one in found)
        if not (most.absolute or any(one.numbers[0].absolute for one in found)):
            norms = f"; gradient norms within {norm:.1e}: their sum is in another order" if norm else ", and gradient norms"
            return [f"equal bit for bit: losses and all {len(found[0].gradients)} gradients{norms}"]
        return [
            f"equal within what sums in another order explain: gradients differ by at most {most.absolute:.1e}, "
            f"{most.relative:.1e} of their largest element ({most.what})"
        ]
    beyond = first.beyond
    rows = [[one.what, f"{one.absolute:.1e}", _size(one.relative), ",".join(map(str, one.ranks))] for one in beyond[:_SHOWN]]
    more = [f".. and {len(beyond) - _SHOWN} more of {len(first.gradients)} gradients"] if len(beyond) > _SHOWN else []
    one = beyond[0]
    return [
        f"DIFFERENT, first in iteration {first.number}, in {'the gradient of ' if one.ranks else 'the '}{one.what}: by "
        f"{one.absolute:.1e}, {_size(one.relative)} of {'its largest element' if one.ranks else 'it'} "
        f"(sums in another order explain {first.tolerance:.0e})",
        "",
        view.plain_table(["in the order of the backward", "differs by", "relative", "on ranks"], rows, words=1),
        *more,
    ]


def _size(relative: float) -> str:
    return f"{relative:.1e}" if relative else "0"


def _model(whole: Namespace) -> str:
    experts = f", {whole.num_experts} experts" if whole.num_experts else ""
    several = whole.global_batch_size // (whole.micro_batch_size * whole.data_parallel_size)
    return (
        f"{counted(whole.num_layers, 'layer')}, hidden size {whole.hidden_size}, {counted(whole.num_attention_heads, 'head')}"
        f"{experts}, {whole.seq_length} tokens, {counted(several, 'microbatch')} of {whole.micro_batch_size}"
    )


def _write_data(args: Namespace, samples: int) -> None:
    """Documents of random tokens, many shorter than a sequence, so that masks at their ends matter."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

    from megatron.pipeline.session.tokenizer import build_tokenizer

    (prefix,), tokenizer, random = args.data_path, build_tokenizer(args), numpy.random.RandomState(_SEED)
    kind = DType.optimal_dtype(tokenizer.vocab_size)
    builder, left = IndexedDatasetBuilder(get_bin_path(prefix), dtype=kind), samples * (args.seq_length + 1)
    while left > 0:
        tokens = [*random.randint(0, tokenizer.eod, random.randint(1, args.seq_length)), tokenizer.eod]
        builder.add_document(torch.tensor(tokens), [len(tokens)])
        left -= len(tokens)
    builder.finalize(get_idx_path(prefix))


def parser() -> Parser:
    parser = own_parser(NAME, "[--shrink] [--iterations N] [--ranks N] [--against 'FLAGS'] -- FLAGS", _HELP, _EPILOG, _EXAMPLES)
    shrink = "fewer layers of each kind, narrower, few experts, short sequences, a small vocabulary; layout and features stay"
    parser.add_argument("--shrink", action="store_true", help=shrink)
    parser.add_argument("--iterations", type=positive_int, default=3, metavar="N", help="of both trainings (default: 3)")
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="processes; by default one replica of the model")
    against = "flags of the layout and schedule of the reference; by default one rank, and megatron-core's own schedule"
    parser.add_argument("--against", default="", metavar="'FLAGS'", help=against)
    return parser
