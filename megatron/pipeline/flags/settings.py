"""The flags of the pipeline schedules, by topic, and all flags as values that are not written.

A field of a topic is a flag: its text for ``--help``, what reads it, and its default stand there once.
Fields without a flag follow from flags, by ``validation.validate``.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn

from megatron.pipeline.flags.flag_types import (
    memory_size,
    not_negative,
    pass_seconds,
    positive_float,
    positive_int,
    share_below_one,
)
from megatron.pipeline.planner import OFF, Links, Offload, Vocabulary

PROFILE = "profile"  # in place of a file of costs: they are measured in this run
ONCE, EVERY_BATCH = "once", "every-batch"  # of --pipeline-plan
WATCH_MODES = "off", "report", "replan"


class Role(Enum):
    """Topic of a flag, for programs that put aside a user's flags of one kind: see ``neutral``."""

    CHUNKS = auto()  # chunks per rank, and how many microbatches each runs in turn
    LAYOUT = auto()  # how ranks share the model, its gradients and its optimizer
    SCHEDULE = auto()  # the pipeline schedule and its transformations
    DETAILS = auto()  # how --vocab-parallel and --offload work
    MEMORY = auto()  # recomputation
    FILES = auto()  # what is read at the start and written on the way
    LENGTH = auto()  # iterations, and what changes over them
    DATA = auto()  # the training data
    PREDICTED = auto()  # what mpipe predicts of models that this project's pretrain_gpt.py does not train


Flag = tuple[list[str], dict[str, Any], Role | None]  # what ``add_argument`` takes, and the role


def add_flags(parser: ArgumentParser, groups: Mapping[str, Sequence[Flag]]) -> None:
    """Add groups of flags to a parser."""
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for names, options, role in flags:
            vars(group.add_argument(*names, **options))["role"] = role


def flag(
    names: str,
    text: str,
    values: Callable[[str], Any] | Sequence[Any] | None = None,
    default: Any = None,
    *,
    clears: str = "",
    role: Role | None = None,
    **options: Any,
) -> Flag:
    """A row of a table of flags.

    Args:
        names: the flag, and further names of it.
        text: for ``--help``.
        values: what reads the flag's value, or the values to choose from; None for a switch.
        clears: the name that a switch sets to False; without it a switch sets its own name to True.
        options: further ones of ``add_argument``.
    """
    options["help"] = text
    if clears:
        options |= {"action": "store_false", "dest": clears}
    elif values is None:
        options["action"] = "store_true"
    elif isinstance(values, Sequence):
        options |= {"choices": values, "type": type(values[0]), "default": default}
    else:
        options |= {"type": values, "default": default}
    return names.split(), options, role


def _ours(*row: Any, reads: Callable[[Any], Any] | None = None, **options: Any) -> Any:
    """A field of a topic: the ``row`` of its flag, and what makes its value of one that is not ``OFF``, which is None."""
    names, values, role = flag(*row, **options)
    default = None if reads else values.get("default", values.get("action") == "store_false" if "action" in values else None)
    return field(default=default, metadata={"row": (names, values, role), "reads": reads})


_add, _schedule, _detail, _files = (partial(_ours, role=role) for role in (None, Role.SCHEDULE, Role.DETAILS, Role.FILES))


# fmt: off
@dataclass(frozen=True)
class PipelineSettings:
    """Flags of the pipeline schedule."""

    config: str | None = _add("--config",
        "YAML file of flags without the dashes; flags on the command line win", str, metavar="FILE")
    model: str | None = _add("--model",
        "a model's config.json of Hugging Face, its folder, or its name: sizes for the flags that are not given", str,
        metavar="PATH")
    schedule: str = _schedule("--pipeline-schedule",
        "a family, file:PATH, or stock for megatron-core's own", str, "zb-h1", metavar="NAME")
    memory_limit: str | None = _schedule("--pipeline-memory-limit",
        "activation memory per rank; 1.0 is 1F1B's peak; or bytes: 12GiB", str, metavar="X")
    costs: str | None = _schedule("--pipeline-costs",
        "plan with this JSON file of every pass's seconds and bytes; or profile: measure them in the first iterations, "
        "and plan again while training goes on", str, metavar="FILE")
    plan: str = _schedule("--pipeline-plan",
        "once, for equal microbatches; or every-batch: for the lengths of each batch's sequences, while the batch before it "
        "computes", [ONCE, EVERY_BATCH], ONCE)
    watch: str | None = _add("--pipeline-watch",
        "ranks and links that become slow: off; report: name them, with what they cost; replan: also plan for them while "
        "training goes on, and swap the plan in. If not given, report where iterations are measured anyway, as by --metrics or "
        "--pipeline-trace", [*WATCH_MODES])
    costs_cache: str | None = _files("--pipeline-costs-cache",
        "file for the costs that --pipeline-costs profile measures; pipeline_costs.json in the directory of --save, else "
        "of --pipeline-trace, if not given", str, metavar="FILE")
    timeout: float = _add("--pipeline-timeout",
        "end all ranks when no pass ends for this long; 300, or half the distributed timeout if less", pass_seconds,
        metavar="SECONDS")
    p2p: str = _add("--pipeline-p2p",
        "start the sends and receives between two passes one by one, or together", ["single", "batched"], "single")
    max_ctas: int | None = _add("--pipeline-max-ctas",
        "limit of NCCL's thread blocks, and so of SMs, for a message or a collective of the vocabulary, which occupies them "
        "while it waits for the other rank; 4 within a node and 8 between nodes if not given", positive_int, metavar="N")
    trace: str | None = _files("--pipeline-trace",
        "write the measured timeline of every logged iteration here", str, metavar="DIR")
    recompute_fused_backward: bool = _schedule("--recompute-fused-backward",
        "B also computes the weight gradients of what it recomputes: less memory, but less W to fill gaps")
    metrics: str | None = _files("--metrics", "append one JSON object per iteration here", str, metavar="FILE")


@dataclass(frozen=True)
class RehearsalSettings:
    """Flags of a rehearsal.

    Attributes:
        seconds: of a message between two stages, as ``hop`` says; None where it is measured.
        links: those of the machine that ``hop`` names, or None.
    """

    on: bool = _add("--rehearse",
        "all ranks share this machine and run their passes one at a time: what each takes alone, the memory of every rank, "
        "and the iteration that a device for every rank would have")
    hop: str | None = _add("--rehearse-hop",
        "seconds of a message between two stages where the training will run; or H100-80GB, A100-80GB or a FILE of mpipe "
        "tune --gpu-from, whose links then count, 8 GPUs a node. Measured here if not given", str, metavar="SECONDS")
    directory: str = _files("--rehearse-dir",
        "the rehearsal's numbers, costs and picture go here", str, "runs/rehearsal", metavar="DIR")
    seconds: float | None = None
    links: Links | None = None


@dataclass(frozen=True)
class VocabularySettings:
    """Flags of the vocabulary layers."""

    spread: Vocabulary | None = _schedule("--vocab-parallel",  # noqa: RUF009
        "shard embedding and output layer over all pipeline ranks: 2 adds one microbatch to each rank's memory, 1 adds two; "
        "interlaced stops all ranks for them", [OFF, "1", "2", "interlaced"], OFF, reads=Vocabulary)
    redistributes: bool = _schedule("--layer-redistribution",
        "give the stages with embedding and output layer fewer transformer layers, according to their cost")
    logits_limit: int | None = _detail("--vocab-logits-limit",
        "with --vocab-parallel: if a rank's logits take more in float32 than this, such as 256MiB, compute them in parts, "
        "and again for their gradient", memory_size, metavar="SIZE")
    masks_padding: bool = _detail("--vocab-mask-padding",
        "with --vocab-parallel: leave rows beyond the tokenizer's vocabulary out of the softmax, in which megatron-core "
        "counts its padding")
    label_smoothing: float = _detail("--label-smoothing",
        "with --vocab-parallel: share of the target that is spread over all tokens", share_below_one, 0.0)
    z_loss: float = _detail("--z-loss",
        "with --vocab-parallel: weight of the softmax denominator's squared logarithm in the loss", not_negative, 0.0)


@dataclass(frozen=True)
class OffloadSettings:
    """Flags of activations in host memory."""

    mode: Offload | None = _schedule("--offload",  # noqa: RUF009
        "copy activations to host memory while ranks compute: full, all whose copies are hidden; selective, at most half, "
        "the longest-lived", [OFF, "selective", "full"], OFF, reads=Offload)
    profile: bool = _schedule("--offload-profile",
        "measure passes, bytes and copies in the first iterations, and plan again: --pipeline-costs profile")
    host_memory: int | None = _schedule("--offload-host-memory",
        "limit of host memory per rank, such as 64GiB", memory_size, metavar="SIZE")
    min_size: int | None = _detail("--offload-min-size",
        "keep smaller tensors on the device; 64KiB if not given", memory_size, metavar="SIZE")
    cpu_bandwidth: float | None = _schedule("--offload-cpu-bandwidth",
        "without a GPU: emulate copies at this speed in each direction", positive_float, metavar="GB/S")


@dataclass(frozen=True)
class StepSettings:
    """Flags of optimizer steps ahead."""

    ahead: bool = _schedule("--post-validation",
        "step before the global gradient norm is known, and roll back on overflow or clipping, so that iterations overlap")
    when: str = _schedule("--post-validation-when",
        "only while measurements show a gain (when not given), or from the first step on", ["measured", "always"])
    copy: str = _schedule("--post-validation-copy",
        "where to keep the copy that a roll-back restores; device when not given", ["device", "host"])
# fmt: on


_TOPICS: dict[str, type] = {
    "pipeline": PipelineSettings,
    "rehearsal": RehearsalSettings,
    "vocabulary": VocabularySettings,
    "offloading": OffloadSettings,
    "steps": StepSettings,
}


def _places(topic: str) -> dict[str, tuple[str, Field[Any]]]:
    """The fields of a topic by the names that ``argparse`` gives their flags."""
    rows = [(one, *one.metadata["row"][:2]) for one in fields(_TOPICS[topic]) if one.metadata]
    return {options.get("dest", names[0][2:].replace("-", "_")): (topic, one) for one, names, options in rows}


_PLACES = {name: place for topic in _TOPICS for name, place in _places(topic).items()}
_TITLES = ("pipeline schedule", "rehearsal", "vocabulary layers", "activations in host memory", "optimizer steps ahead")
NEW: dict[str, list[Flag]] = {
    title: [one.metadata["row"] for one in fields(topic) if one.metadata]
    for title, topic in zip(_TITLES, _TOPICS.values(), strict=True)
}
OURS = {name for flags in NEW.values() for names, *_ in flags for name in names}


class Flags(Namespace):
    """Values by the names of flags, as they were read; ``flags | {"seq_length": 1024}`` are the same with another one.

    Raises:
        AttributeError: an attribute is set or deleted.
    """

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __or__(self, values: Mapping[str, Any]) -> Any:
        return type(self)(**vars(self) | dict(values))

    def __setattr__(self, name: str, *value: object) -> NoReturn:
        raise AttributeError(f"flags are not written, and {name} would be: make others with flags | {{{name!r}: ...}}")

    __delattr__ = __setattr__


class Settings(Flags):
    """Flags that fit together: Megatron-LM's by their names, and those of the pipeline schedules by topic.

    ``settings | {"vocab_parallel": None}`` finds the topic.
    """

    pipeline: PipelineSettings
    rehearsal: RehearsalSettings
    vocabulary: VocabularySettings
    offloading: OffloadSettings
    steps: StepSettings

    @classmethod
    def of(cls, flags: Namespace) -> Settings:
        """Settings of flags that were read; some of them may be missing, and are not given then."""
        # A script may have a flag --steps of its own.
        values = {name: value for name, value in vars(flags).items() if isinstance(value, _TOPICS.get(name, object))}
        return cls(**{name: topic() for name, topic in _TOPICS.items()}) | values

    def __or__(self, values: Mapping[str, Any]) -> Settings:
        changed: dict[str, Any] = {name: value for name, value in values.items() if name not in _PLACES}
        for name in values.keys() & _PLACES.keys():
            (topic, one), value = _PLACES[name], values[name]
            if reads := one.metadata["reads"]:
                value = None if value in (OFF, None) else reads(value)
            changed[topic] = replace(changed.get(topic, getattr(self, topic)), **{one.name: value})
        return Settings(**vars(self) | changed)


def flat(args: Namespace) -> dict[str, Any]:
    """Values by the names of flags, as they were read, of settings or of upstream's flags."""
    if not isinstance(args, Settings):
        return vars(args)
    values = {name: value for name, value in vars(args).items() if name not in _TOPICS}
    for name, (topic, one) in _PLACES.items():
        value = getattr(getattr(args, topic), one.name)
        values[name] = str(value or OFF) if one.metadata["reads"] else value
    return values
