"""Flags of Megatron-LM that our schedules support, and the flags as our own planning reads them."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from megatron.pipeline.patches import compat, unsupported

from megatron.pipeline.dist.device import local_device
from megatron.pipeline.flags import support
from megatron.pipeline.flags.cautions import PACKED
from megatron.pipeline.flags.flags import CHUNK_FLAGS, flag_of, switched_on
from megatron.pipeline.flags.validation import check_new_flags, check_rotary, chunks_per_rank
from megatron.pipeline.flags.validation_experts import check_overlap, check_prediction, experts_drift
from megatron.pipeline.flags.validation_quantized import check_quantized
from megatron.pipeline.launch.adapt import exclusions, refusal
from megatron.pipeline.model import te_linear
from megatron.pipeline.model.adapter import has_adapter
from megatron.pipeline.model.slices import check_slices
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.schedule.core.names import STOCK


def check_flags(args: Namespace) -> None:
    """Refuse flags that our schedules do not support; ``args`` are as the parser has read them.

    Sets ``args.chunks``: per rank, None for the schedule's own number.

    Raises:
        ValueError: says which flag, and what to do without it.
    """
    ours = (
        ("--rehearse-park", args.rehearse_park, "moves the optimizer's state, which the training loop has"),
        (f"--rehearse-replicas {args.rehearse_replicas}", args.rehearse_replicas,
            "makes the world with ranks that are not there, which the script does here"),
    )  # fmt: skip
    for flag, is_given, why in ours:
        if is_given:
            raise ValueError(f"{flag} {why}: use the pretrain_gpt.py of megatron.pipeline, or leave {flag.split()[0]} out")
    if local_device(args.rehearse)[1]:
        raise ValueError(
            "--rehearse with more ranks than GPUs has process groups of its own, and the script makes its own here: use the "
            "pretrain_gpt.py of megatron.pipeline, or start as many ranks as there are GPUs"
        )
    if args.pipeline_schedule == STOCK:
        return
    checks = (check_quantized, _check_settings, _check_steps_ahead)
    wrong = [wrong_in_megatron_core(args), *(_words(check, args) for check in checks)]
    if found := [words for words in wrong if words]:
        raise ValueError(". ".join(found))
    args.chunks = chunks_per_rank(args)


def check_validated(args: Namespace) -> None:
    """Refuse what upstream's validation makes of flags: the settings of a model's configuration that our schedules exclude.

    Raises:
        ValueError: says which flag, and what to do without it.
    """
    _check_settings(args, in_config=True)


def _words(check: Callable[[Namespace], None], args: Namespace) -> str | None:
    """With what a check refuses flags, so that all is said at once."""
    try:
        check(args)
    except ValueError as error:
        return str(error)
    return None


def _check_settings(args: Namespace, in_config: bool = False) -> None:
    if found := exclusions(args, in_config):
        raise ValueError(refusal(found))


_BEHIND_STEPS = "acts on weights behind a step, when forwards of the next iteration have begun"
_NOT_AHEAD = {
    "log_num_zeros_in_grad": "counts what a step ahead does not wait for",
    "qk_clip": _BEHIND_STEPS,
    "log_max_attention_logit": "reads behind a step what forwards of the next iteration have begun to write",
    "moe_expert_rank_capacity_factor": "may run an iteration again",
    "optimizer_cpu_offload": "steps on the CPU, in a way that no copy here rolls back",
    "use_precision_aware_optimizer": "keeps parameters in a form that no copy here rolls back",
}


def _check_steps_ahead(args: Namespace) -> None:
    """Refuse what does not go with steps that are taken before they are known to stand."""
    if not args.post_validation:
        return
    given = next((name for name in _NOT_AHEAD if getattr(args, name, None)), None)
    if given:
        raise ValueError(f"{flag_of(given)} {_NOT_AHEAD[given]}: leave it out, or leave --post-validation out")
    if args.optimizer not in ("adam", "sgd"):
        raise ValueError(
            f"--optimizer {args.optimizer}: --post-validation rolls back steps of adam and sgd: take one of them, or leave "
            "--post-validation out"
        )


def check_source(args: Namespace) -> None:
    """Refuse a file that upstream reads in place of all flags, before it does: ``check_flags`` would not see ours.

    Raises:
        ValueError: says what to give in its place.
    """
    if getattr(args, "yaml_cfg", None) is not None:
        raise ValueError(f"--yaml-cfg {unsupported.UNSUPPORTED['yaml_cfg'].reason}")


_REUSES = "reuse_grad_buf_for_mxfp8_param_ag"
_MIXING = {
    "overlap_param_gather": "adds weights to the gradients of the iteration behind each evaluation and checkpoint",
    "num_experts": "takes gradients of experts for their weights, which the step of dense layers gathers with its own",
}


def wrong_in_megatron_core(args: Namespace) -> str | None:
    """Flags that this release of megatron-core trains wrongly under any schedule, also its own; None if nothing is known."""
    tensor = args.tensor_model_parallel_size
    if switched_on(args, "sft") and tensor > 1 and not compat.shares_packed_sequences():
        return (
            f"--sft with --tensor-model-parallel-size {tensor}: Megatron-LM {compat.version()} does not tell all tensor-parallel "
            "ranks where packed sequences begin: give --tensor-model-parallel-size 1, or take release 0.17 or later"
        )
    mixing = switched_on(args, *_MIXING)
    if switched_on(args, _REUSES) and mixing and not compat.gathers_into_gradients_right():
        return (
            f"{flag_of(_REUSES)} with {flag_of(mixing)}: Megatron-LM {compat.version()} {_MIXING[mixing]}: leave it and "
            "--fp8-param-gather out, or take release 0.19 or later"
        )
    return None if compat.reduces_experts_right() else experts_drift(args)


def separates_documents(args: Namespace) -> str | None:
    """The flag, by its name, with which attention stays within documents, which only data tell: all stages then read all."""
    return switched_on(args, "reset_attention_mask", *PACKED)


def documents_run_together(args: Namespace) -> str | None:
    """Why attention of some layers would go across documents under Megatron-LM's own schedules; None if it stays within.

    Megatron-LM's scripts read data for the first and the last stage, and packed sequences from 0.17 on for every stage.

    Args:
        args: validated.
    """
    given = separates_documents(args)
    if given is None or (given in PACKED and compat.shares_packed_sequences()):
        return None
    stages = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    if stages <= 2:
        return None
    return (
        f"{flag_of(given)}: Megatron-LM's script tells documents to the first and the last of {stages} stages alone, and the "
        "layers of all others attend across them; schedules of ours tell all"
    )


def untested(args: Namespace) -> list[str]:
    """Warnings of flags that are accepted and not tested with our schedules."""
    if args.pipeline_schedule == STOCK:
        return []
    warnings = []
    if titles := ", ".join(feature.title for feature in support.untested(args)):
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


@contextmanager
def hidden(args: Namespace) -> Iterator[None]:
    """Keep flags about chunks from upstream's validation, which divides layers as an interleaved placement does."""
    given = {name: getattr(args, name, None) for name in CHUNK_FLAGS}
    for name in CHUNK_FLAGS:
        setattr(args, name, None)
    # With a layout, here of one stage a rank, upstream leaves the numbers of layers to it.
    args.pipeline_model_parallel_layout = "|".join(["t"] * args.pipeline_model_parallel_size)
    try:
        yield
    finally:
        for name, value in given.items():
            setattr(args, name, value)


def complete(args: Namespace) -> Namespace:
    """A copy of the flags that upstream has validated, as our own program has them after ``validate``.

    Raises:
        ValueError: flags of ours contradict each other or upstream's.
    """
    from megatron.training import get_tokenizer

    ours = copy.copy(args)
    if args.rampup_batch_size is not None:
        ignored = compat.ramps_up_by_steps()
        ours.rampup_batch_size = None if ignored else [int(size) for size in args.rampup_batch_size]
    if args.pipeline_schedule == STOCK:
        ours.chunks = args.virtual_pipeline_model_parallel_size
    tokenizer = get_tokenizer() if args.vocab_size is None else None
    ours.vocab_size = tokenizer.vocab_size if tokenizer else args.vocab_size
    check_new_flags(ours)
    if args.transformer_impl == "transformer_engine" and args.pipeline_schedule != STOCK:
        te_linear.check_version()
    if args.pipeline_schedule != STOCK:
        check_prediction(ours)
        check_overlap(ours)
        if not getattr(ours, "multi_latent_attention", False):
            check_rotary(ours)
    return ours


def check_plan(args: Namespace, pipeline: Pipeline, microbatches: list[int]) -> None:
    """Refuse schedules that need what Megatron-LM's models do not do.

    Raises:
        ValueError: the schedule cuts microbatches in a way that a flag forbids, or recomputes what draws at random.
    """
    check_slices(args, pipeline.plans.splits)
    dropout = args.hidden_dropout > 0 or args.attention_dropout > 0
    jitter = getattr(args, "moe_input_jitter_eps", None)
    recomputes = any(pipeline.plans.plan(count).schedule.reruns for count in microbatches)
    te_linear.check_quantized(args, offloads=False, steps_ahead=False, reruns=recomputes)
    if (dropout or jitter) and (recomputes or pipeline.plans.splits > 1):
        what = "runs forwards again (R)" if recomputes else "runs slices of microbatches"
        drawn = f"jitter of --moe-input-jitter-eps {jitter}" if jitter else "dropout masks"
        fix = "leave it out, or take another schedule"
        if not jitter:
            fix = (
                "give --attention-dropout 0 --hidden-dropout 0, another schedule, or use the pretrain_gpt.py of megatron.pipeline"
            )
        raise ValueError(
            f"--pipeline-schedule {pipeline.name} {what}, and Megatron-LM's models would then draw other {drawn}: {fix}"
        )


def check_model(model: object, pipeline: Pipeline) -> None:
    """Refuse models that do not take their layers from the placement.

    Raises:
        ValueError: the script has built a model that is no GPTModel and has no adapter.
    """
    if not has_adapter(model):
        raise ValueError(
            f"--pipeline-schedule {pipeline.name} places the layers of megatron-core's GPTModel and its subclasses, and this "
            f"script builds {type(model).__name__}: take --pipeline-schedule stock"
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
