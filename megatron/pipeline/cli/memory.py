"""``mpipe memory``: what every rank of a training needs of its GPU's memory, and what would help where that is too much."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from megatron.pipeline.cli.arguments import Commands, add_command, report_flags
from megatron.pipeline.cli.letters import by_letter
from megatron.pipeline.cli.summary import check_output, write
from megatron.pipeline.flags.flag_types import count
from megatron.pipeline.flags.flags import STOCK_1F1B, actions, given, neutral
from megatron.pipeline.flags.importers.upstream import settle
from megatron.pipeline.flags.settings import OURS, Flags, Role, Settings
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.planner import MOST_RANKS, OFF, STOCK, Links, Schedule, parameters, ranges, rank_memory, view

_DEFAULT = {"pipeline_schedule": actions()["pipeline_schedule"].default}
LOCAL = "local"  # of --transformer-impl: layers without Transformer Engine
FUSED = "assumes Transformer Engine, whose attention is fused"
_OVERHEAD = rank_memory.OVERHEAD / rank_memory.GIB
NOTE = f"""\
State: weights, gradients and optimizer. Activations: at their peak, when the rank holds that number of microbatches.
Other: the largest temporary, and {_OVERHEAD:g} GiB for CUDA, NCCL and what the allocator cannot use."""
_WHOLE_LAYERS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# What takes less memory, by the flags that would have to be added: what costs least time first.
REMEDIES = (
    "--use-distributed-optimizer",
    "--vocab-parallel 2",
    "--vocab-parallel off",
    "--pipeline-schedule v-half",
    "--pipeline-schedule v-min",
    "--offload full",
    "--pipeline-schedule v-half --offload full",
    f"{_WHOLE_LAYERS} --recompute-fused-backward",
    f"--pipeline-schedule v-min --vocab-parallel 2 {_WHOLE_LAYERS} --recompute-fused-backward",
)


@dataclass(frozen=True)
class Prediction:
    """A training that could be started, and what its ranks need.

    Attributes:
        args: its flags, checked and completed.
        schedule: what an iteration runs.
        layers: of every stage, in the model's order.
        ranks: the memory of every pipeline rank.
        microbatches: of an iteration, which may be more than the schedule has: see ``_fewer_microbatches``.
        message_buffers: the most messages whose memory a rank needs at a time; None for megatron-core's own schedule.
    """

    args: Settings
    schedule: Schedule
    layers: list[int]
    ranks: list[rank_memory.RankMemory]
    microbatches: int
    message_buffers: int | None

    @property
    def message_bytes(self) -> float | None:
        """Bytes of ``message_buffers``."""
        size = shape_of(self.args).hidden_bytes / self.schedule.splits
        return None if self.message_buffers is None else self.message_buffers * size

    @property
    def fullest(self) -> rank_memory.RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "memory",
        "predict the GPU memory of every rank of a training",
        run,
        "mpipe memory --config configs/llama3/8B.yaml",
        "mpipe memory --config configs/llama3/8B.yaml --pipeline-schedule v-half --gpu-memory 48 --world-size 16",
        epilog=f"All other flags are those of pretrain_gpt.py, --config FILE among them. Data need not be given. {NOTE}",
        parents=[report_flags("one JSON object", "write there instead of to the terminal: .json or .txt")],
    )
    parser.flag("--gpu-memory", "memory on a GPU's label, in GB that are GiB (80)", gpu_memory, 80.0, metavar="X")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--data-parallel-size", type=count, metavar="D", help="replicas of the model (default: as few as experts allow)"
    )
    size.add_argument("--world-size", type=count, metavar="N", help="all GPUs of the training")
    parser.set_defaults(takes_flags=True)


def run(options: argparse.Namespace) -> None:
    check_output(options)
    flags = options.flags
    prediction = predicted(flags, options.data_parallel_size, options.world_size)
    world = describe(prediction.args).gpus
    stock = prediction.args.pipeline.schedule == STOCK
    try:
        other = predicted(flags, world_size=world, changes=neutral(Role.CHUNKS) | _DEFAULT if stock else STOCK_1F1B)
    except ValueError:
        other = None  # the model cannot be cut for it
    from megatron.pipeline.session.memory import more_than_stock

    warning = more_than_stock(prediction.args, prediction.ranks, other.ranks if other and not stock else None)
    limit = options.gpu_memory * rank_memory.GIB
    fits = prediction.fullest.total <= rank_memory.usable(limit)
    remedies = [] if fits else list(_remedies(flags, world, rank_memory.usable(limit)))
    say_not_modelled(prediction.args)
    contents = report(prediction) | {
        "gpu_memory": limit,
        "fits": fits,
        "not_modelled": prediction.args.not_modelled,
        "baseline": None if stock else other and report(other),
        "ours": other and report(other) if stock else None,
        "warning": warning,
        "remedies": [{"flags": remedy, "bytes": needed} for remedy, needed in remedies],
    }
    write(contents, lambda: _text(prediction, other, warning, options.gpu_memory, remedies), options)


def predicted(
    flags: list[str],
    data_parallel_size: int | None = None,
    world_size: int | None = None,
    changes: Mapping[str, Any] = MappingProxyType({}),
    engine: str | None = None,
) -> Prediction:
    """Plan a training on GPUs, and predict the memory of its ranks.

    Args:
        flags: of ``pretrain_gpt.py``; data may be left out, and nothing is written.
        data_parallel_size: replicas of the model, where ``world_size`` is None; by default as few as the experts allow.
        world_size: number of all ranks.
        changes, engine: see ``read_flags``.

    Raises:
        ValueError: the flags are wrong, or there is no schedule for them; says what to change.
    """
    with quietly():
        # Planning for training brings torch along, which no other command needs.

        from megatron.pipeline.flags.config import microbatch_counts
        from megatron.pipeline.flags.validation import validate
        from megatron.pipeline.flags.validation_rehearsal import least_replicas
        from megatron.pipeline.model.layout import decoder_layers
        from megatron.pipeline.session.memory import largest_iteration
        from megatron.pipeline.session.planning import as_planned, plan_pipeline
        from megatron.pipeline.session.tokenizer import sizes_of_vocabulary, vocabulary_size

        args = read_flags(flags, changes, engine)
        model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
        world_size = world_size or (data_parallel_size or least_replicas(args)) * model
        if world_size > MOST_RANKS * MOST_RANKS or args.pipeline_model_parallel_size > MOST_RANKS:
            raise ValueError(f"{args.pipeline_model_parallel_size} pipeline ranks of {world_size} are too many to plan for")
        settings = validate(args, world_size, elsewhere=True)
        whole = max(microbatch_counts(settings))
        settings = _fewer_microbatches(settings)
        settings |= sizes_of_vocabulary(vocabulary_size(settings), settings)
        pipeline = plan_pipeline(settings, measure=False, evaluates=False)
        args = as_planned(settings, pipeline)
        schedule = largest_iteration(args, pipeline)
        messages = None if pipeline.is_stock else pipeline.plans.plan(schedule.microbatches).message_buffers
        layers = decoder_layers(args, schedule.placement)
        return Prediction(args, schedule, layers, rank_memory.predict(describe(args), schedule, layers), whole, messages)


def read_flags(flags: list[str], changes: Mapping[str, Any] = MappingProxyType({}), engine: str | None = None) -> Flags:
    """Flags of ``pretrain_gpt.py``, not validated yet, for a prediction: they need no data, and no file is written.

    Without a schedule, or another flag of ours about one, they are a line of Megatron-LM's, which runs its own.

    Args:
        changes: values by the names of flags that count in place of those in ``flags``: ``STOCK_1F1B``.
        engine: of layers, where ``flags`` name none.

    Raises:
        ValueError: a flag is unknown or has a wrong value.
    """
    from megatron.pipeline.flags.arguments import parse

    args = parse(flags, predicts=True)
    read, not_modelled = settle(args)
    if read.pipeline_schedule is None:
        stages = given(read, *neutral(Role.CHUNKS)) or "|" in (read.hybrid_layer_pattern or "")
        ours = OURS.intersection(given(read | _DEFAULT, *neutral(Role.SCHEDULE, Role.DETAILS)))
        read |= _DEFAULT if ours and not stages else {"pipeline_schedule": STOCK}
    own = {"not_modelled": not_modelled, "transformer_impl": read.transformer_impl or engine}
    return read | neutral(Role.FILES) | own | changes


def say_not_modelled(args: Namespace) -> None:
    """One line on stderr about flags that matter, and that a prediction leaves out."""
    if args.not_modelled:
        print(f"mpipe: not in this prediction: {'; '.join(args.not_modelled)}", file=sys.stderr)


@contextmanager
def quietly() -> Iterator[None]:
    """Silence megatron-core's warnings about optional packages that are not installed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        yield


def _fewer_microbatches(args: Settings) -> Settings:
    """Plan for no more microbatches than fill the pipeline a few times: what ranks hold at most is then reached."""
    if args.pipeline.schedule.startswith("file:") or args.microbatch_group_size_per_vp_stage:
        return args  # for one number of them, or for those that the groups divide
    unit = args.micro_batch_size * args.data_parallel_size
    enough = unit * rank_memory.enough_microbatches(args.global_batch_size // unit, args.pipeline_model_parallel_size)
    return args if args.global_batch_size == enough else args | {"rampup_batch_size": None, "global_batch_size": enough}


def report(prediction: Prediction) -> dict[str, Any]:
    """Content of ``--json`` about a training."""
    args = prediction.args
    return {
        "schedule": args.pipeline.schedule,
        "pp": args.pipeline_model_parallel_size,
        "tp": args.tensor_model_parallel_size,
        "cp": args.context_parallel_size,
        "dp": args.data_parallel_size,
        "vocab_parallel": args.vocabulary.spread or OFF,
        "microbatches": prediction.microbatches,
        "parameters": parameters.total_parameters(shape_of(args), not args.untie_embeddings_and_output_weights),
        "transformer_impl": args.transformer_impl,
        "overhead": rank_memory.OVERHEAD,
        "message_buffers": prediction.message_buffers,
        "message_bytes": prediction.message_bytes,
        "peak_bytes": prediction.fullest.total,
        "peak_bytes_range": [bound * rank_memory.GIB for bound in _likely(prediction)],
        "ranks": [asdict(rank) | {"total": rank.total} for rank in prediction.ranks],
    }


def _likely(prediction: Prediction) -> tuple[float, float]:
    """GiB within which peaks of the fullest rank were, of trainings whose peaks were published."""
    shape, fullest = shape_of(prediction.args), prediction.fullest
    low, high = ranges.learnt("memory", shape, rank_memory.any_device(shape)).of(fullest.counted)
    return (low + rank_memory.OVERHEAD) / rank_memory.GIB, (high + rank_memory.OVERHEAD) / rank_memory.GIB


def _remedies(flags: list[str], world: int, limit: float) -> Iterator[tuple[str, float]]:
    """Flags with which the training fits, with the bytes of its fullest rank."""
    for remedy in REMEDIES:
        try:
            changes = neutral(Role.CHUNKS) if "--pipeline-schedule" in remedy else {}
            needed = predicted([*flags, *remedy.split()], world_size=world, changes=changes).fullest.total
        except ValueError:
            continue  # does not go together with the other flags
        if needed <= limit:
            yield remedy, needed


def _text(
    prediction: Prediction, other: Prediction | None, warning: str | None, gpu_memory: float, remedies: list[tuple[str, float]]
) -> str:
    parts = [f"{title(prediction)}\n\n{table(prediction)}"]
    if other and other.ranks != prediction.ranks:
        stock = other.args.pipeline.schedule == STOCK
        what = "stock: megatron-core's own 1F1B, not interleaved" if stock else f"{schedule_name(other.args)}: our default"
        parts.append(f"for comparison, {what}\n\n{table(other)}")
    if graphs := max(rank.graphs for rank in prediction.ranks):
        parts.append(
            f"of other GiB, CUDA graphs keep up to {graphs / rank_memory.GIB:.2f} on a rank: inputs, gradients and pools"
        )
    if warning:
        parts.append(warning)
    fullest, size = prediction.fullest.total / rank_memory.GIB, f"{gpu_memory:g} GB"
    if fullest <= rank_memory.usable(gpu_memory):
        likely = ranges.in_words(*_likely(prediction), "GiB")
        parts.append(f"fits into {size}: the fullest rank needs {fullest:.1f} GiB, likely {likely}")
    else:
        would = "\n".join(f"  {needed / rank_memory.GIB:6.1f} GiB  {remedy}" for remedy, needed in remedies)
        verdict, more = "does not fit", ""
        if fullest <= gpu_memory:
            verdict = "may not fit"
            more = f", more than {rank_memory.SHARE:.0%}, and this prediction may be off by as much as is left"
        helps = "No schedule, recomputation or --vocab-parallel is enough: take more ranks, or --optimizer-cpu-offload."
        if would:
            helps = f"What would fit, and the fullest rank's memory:\n{would}"
        parts.append(f"{verdict} into {size}: the fullest rank needs {fullest:.1f} GiB{more}. {helps}")
    if prediction.args.transformer_impl != LOCAL:
        unfused = rank_memory.predict(
            describe(prediction.args | {"transformer_impl": LOCAL}), prediction.schedule, prediction.layers
        )
        most = max(rank.total for rank in unfused) / rank_memory.GIB
        parts.append(f"{FUSED}; with --transformer-impl {LOCAL} the fullest rank needs {most:.1f} GiB")
    model, gpu = describe(prediction.args), rank_memory.any_device(shape_of(prediction.args))
    letters = by_letter(model, gpu, prediction.schedule.placement.depth, Links.of_model(gpu, model), timed=False)
    return "\n\n".join([*parts, *([letters] if letters else []), NOTE])


def title(prediction: Prediction) -> str:
    """The model, its layout and its batch in a line."""
    contents = report(prediction)
    sizes = " x ".join(
        f"{name.upper()} {contents[name]}" for name in ("pp", "tp", "cp", "dp") if name == "pp" or contents[name] > 1
    )
    count = contents["parameters"]
    amount = f"{count / 1e9:.2f} billion" if count > 1e9 else f"{count / 1e6:.2f} million"
    return (
        f"{schedule_name(prediction.args)}: {amount} parameters, {sizes}, {contents['microbatches']} "
        f"microbatches of {prediction.args.micro_batch_size} x {prediction.args.seq_length} tokens"
    )


def table(prediction: Prediction) -> str:
    """Table of what every rank needs."""
    heads = ["rank", "layers", "parameters", "state GiB", "activations GiB", "microbatches", "other GiB", "total GiB"]
    cells = [
        [
            str(number),
            str(rank.layers),
            f"{rank.parameters / 1e6:.1f}M",
            f"{rank.state / rank_memory.GIB:.2f}",
            f"{rank.activations / rank_memory.GIB:.2f}",
            f"{rank.microbatches:.4g}",
            f"{(rank.temporary + rank.graphs + rank_memory.OVERHEAD) / rank_memory.GIB:.2f}",
            f"{rank.total / rank_memory.GIB:.2f}",
        ]
        for number, rank in enumerate(prediction.ranks)
    ]
    return view.plain_table(heads, cells)


def schedule_name(args: Namespace) -> str:
    """The name of a schedule, with the flags that change it."""
    values = {"--vocab-parallel": args.vocabulary.spread, "--offload": args.offloading.mode}
    return " ".join([args.pipeline.schedule, *(f"{flag} {value}" for flag, value in values.items() if value)])


def gpu_memory(text: str) -> float:
    """An argument type for ``80`` or ``80GB``."""
    match = re.fullmatch(r"(\d{1,5}(\.\d+)?)(GB)?", text)
    if not match or not float(match[1]):
        raise ValueError(f"expected a GPU's memory such as 80 or 80GB, got {text!r}")
    return float(match[1])
