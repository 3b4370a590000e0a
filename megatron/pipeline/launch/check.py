"""Flags of Megatron-LM that our schedules support, and the flags as our own planning reads them."""

from __future__ import annotations

from argparse import Namespace
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.pipeline.patches import compat
from megatron.pipeline.patches.upstream_args import written

from megatron.pipeline.distributed.device import local_device
from megatron.pipeline.flags import support
from megatron.pipeline.flags.facts import PACKED, of_flags
from megatron.pipeline.flags.flags import CHUNK_FLAGS
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.flags.validation import check_rotary, chunks_per_rank, of_new_flags
from megatron.pipeline.launch.adapt import exclusions, refusal
from megatron.pipeline.model import te_linear
from megatron.pipeline.model.adapter import has_adapter
from megatron.pipeline.planner import STOCK, families, reading, topics
from megatron.pipeline.runtime.pipeline import Pipeline


def check_flags(args: Namespace, **known: Any) -> None:
    """Refuse flags that our schedules do not support.

    Args:
        args: as the parser has read them.
        known: facts of where the training will run, where that is elsewhere.

    Raises:
        ValueError: says which flag, and what to do without it.
    """
    families.check(args.pipeline_schedule)
    facts = of_flags(args, launch=True, **{"crowded": local_device(args.rehearse)[1]} | known)
    wrong = facts.sentences(topics.STARTED, topics.LAUNCHED)
    if args.pipeline_schedule != STOCK:
        excluded = exclusions(args)
        wrong = [
            *facts.sentences(topics.LETTERS, topics.WRONG, topics.QUANTIZED, topics.SCHEDULES),
            *([refusal(excluded)] if excluded else []),
            *wrong,
        ]
    if wrong:
        raise ValueError(". ".join(wrong))
    if args.pipeline_schedule != STOCK:
        chunks_per_rank(args)  # which upstream's validation does not see: ``hidden``
        if pattern := getattr(args, "hybrid_layer_pattern", None):
            with reading.NamedErrors(f"--hybrid-layer-pattern {pattern}:"):  # letters that are not of this release
                compat.get("megatron.core.models.hybrid.hybrid_layer_allocation", "parse_hybrid_pattern")(pattern)


def separates_documents(args: Namespace) -> bool:
    """Tell whether attention stays within documents, which only data tell: all stages then read all."""
    return any(getattr(args, name, False) for name in ("reset_attention_mask", *PACKED))


def untested(args: Namespace, unasked: Namespace | None = None) -> list[str]:
    """Warnings of flags that are accepted: not tested with our schedules, or wrong under megatron-core's own.

    Args:
        unasked: all flags with their defaults, which no warning is about.
    """
    if args.pipeline_schedule == STOCK:
        return [f"WARNING: {wrong}" for wrong in of_flags(args, launch=True).sentences(topics.WRONG)]
    warnings = []
    if titles := ", ".join(feature.title for feature in support.untested(args) if not feature.is_on(unasked or Namespace())):
        warnings.append(
            f"WARNING: not tested with --pipeline-schedule {args.pipeline_schedule}: {titles} (mpipe support). Compare some "
            f"iterations with --pipeline-schedule {STOCK}"
        )
    if getattr(args, "rampup_batch_size", None) is not None and compat.ramps_up_by_steps():
        warnings.append(
            f"WARNING: megatron-core {compat.version()} ignores --rampup-batch-size: take --step-batch-size-schedule, or the "
            "batch is --global-batch-size from the start"
        )
    return warnings


def hidden(args: Namespace) -> AbstractContextManager[None]:
    """Keep flags about chunks, and ``|``, from upstream's validation."""
    values: dict[str, object] = {"pipeline_model_parallel_layout": "|".join(["t"] * args.pipeline_model_parallel_size)}
    if pattern := getattr(args, "hybrid_layer_pattern", None):
        values = {"hybrid_layer_pattern": pattern.replace("|", "")}
    return written(args, **dict.fromkeys(CHUNK_FLAGS) | values)


def complete(args: Namespace) -> Settings:
    """Settings of the flags that upstream has validated, as our own program has them after ``validate``.

    Raises:
        ValueError: flags of ours contradict each other or upstream's.
    """
    from megatron.training import get_tokenizer

    stock, ramp = args.pipeline_schedule == STOCK, None if compat.ramps_up_by_steps() else args.rampup_batch_size
    ours = of_new_flags(
        Settings.of(args)
        | {
            "rampup_batch_size": ramp and [int(size) for size in ramp],
            "chunks": args.virtual_pipeline_model_parallel_size if stock else chunks_per_rank(args),
            "vocab_size": get_tokenizer().vocab_size if args.vocab_size is None else args.vocab_size,
        }
    )
    if not stock:
        of_flags(ours).refuse(topics.MODELS)
        if args.transformer_impl == "transformer_engine":
            te_linear.check_version()
        if not getattr(ours, "multi_latent_attention", False):
            check_rotary(ours)
    return ours


def check_plan(args: Namespace, pipeline: Pipeline, microbatches: list[int]) -> None:
    """Refuse schedules that need what Megatron-LM's models do not do.

    Raises:
        ValueError: the schedule cuts microbatches in a way that a flag forbids, or recomputes what draws at random.
    """
    reruns = any(pipeline.plans.plan(count).schedule.reruns for count in microbatches)
    of_flags(args, launch=True, splits=pipeline.plans.splits, reruns=reruns).refuse(topics.SCHEDULES, topics.LAUNCHED)


def check_model(model: object, pipeline: Pipeline) -> None:
    """Refuse models that do not take their layers from the placement.

    Raises:
        ValueError: the script has built a model that is neither, and has no adapter.
    """
    if not has_adapter(model):
        raise ValueError(
            f"--pipeline-schedule {pipeline.name} places the layers of megatron-core's GPTModel and HybridModel and their "
            f"subclasses, and this script builds {type(model).__name__}: take --pipeline-schedule stock"
        )


def defaults_without_gpu() -> dict[str, object]:
    """Values that Megatron-LM's flags need on a machine without a GPU; empty on others."""
    if torch.cuda.is_available():
        return {}
    fusions = ("masked_softmax", "gradient_accumulation", "bias_gelu", "bias_swiglu", "bias_dropout", "apply_rope")
    return {
        "distributed_backend": "gloo",
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "no_persist_layer_norm": True,
        **{f"{name}_fusion": False for name in fusions},
    }
