"""Description that the checkpoint of ``--load`` has of itself, and whether the flags go with it: before anything starts.

Ours say in ``training.json`` what was saved; those of Megatron-LM have its flags in the common state: the file ``common.pt``, or
from megatron-core 0.19 on an object among the tensors.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from megatron.pipeline.planner import flag_of
from megatron.pipeline.session.checkpoints import RELEASE, RESHARDABLE, Unreadable, contents_of, damaged, find
from megatron.pipeline.session.tokenizer import padded_vocab_size
from megatron.pipeline.trainer.optimizer_state import has_state, kind_of_state, wanted_kind

SUMMARY = "training.json"
_VOCABULARY = "the tokenizer's vocabulary"

_MODEL_FLAGS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "num_query_groups",
    "kv_channels", "max_position_embeddings", "position_embedding_type", "rotary_base", "rotary_percent", "swiglu",
    "squared_relu", "normalization", "qk_layernorm", "add_qkv_bias", "untie_embeddings_and_output_weights",
    "num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq", "mtp_num_layers",
)  # fmt: skip
_SCHEDULE_FLAGS = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "start_weight_decay", "end_weight_decay",
    "weight_decay_incr_style", "train_iters", "global_batch_size",
)  # fmt: skip
# Where they are in the state of the scheduler, which counts samples.
_SCHEDULER = {
    "lr": "max_lr", "min_lr": "min_lr", "lr_decay_style": "lr_decay_style", "start_weight_decay": "start_wd",
    "end_weight_decay": "end_wd", "weight_decay_incr_style": "wd_incr_style",
}  # fmt: skip
_SCHEDULER_SAMPLES = {"lr_decay_iters": "lr_decay_steps", "lr_warmup_iters": "lr_warmup_steps", "train_iters": "wd_incr_steps"}
# Flags of Megatron-LM that make another model of the same weights, and that this program does not have.
_FOREIGN_FLAGS = (
    "rotary_interleaved", "use_rope_scaling", "rotary_seq_len_interpolation_factor", "no_rope_freq", "window_size",
    "multi_latent_attention", "attention_output_gate", "qk_l2_norm", "experimental_attention_variant", "openai_gelu",
    "quick_geglu", "glu_linear_offset", "activation_func_clamp_value", "apply_layernorm_1p", "layernorm_zero_centered_gamma",
    "apply_residual_connection_post_layernorm", "moe_apply_probs_on_input", "is_hybrid_model", "spec",
    "heterogeneous_layers_config_path",
)  # fmt: skip


class _Saved(NamedTuple):
    """Description that a checkpoint has of itself.

    Attributes:
        model, schedule: by flag; the learning rate's schedule is empty where the optimizer was not saved.
        optimizer: the optimizer's state without its tensors; None where it was not saved.
        sharding: of the distributed optimizer's tensors.
        tensors: the names of all tensors.
    """

    model: dict[str, Any]
    schedule: dict[str, Any]
    optimizer: dict[Any, Any] | None
    sharding: str
    tensors: Collection[str]


def check(args: Namespace) -> None:
    """Compare the flags with the checkpoint that ``--load`` would read.

    Raises:
        ValueError: it is damaged, or of another model, has no optimizer's state that the flags could go on with, or another
            learning-rate schedule; or there is none, and ``--exit-on-missing-checkpoint`` is given.
    """
    path = find(args.load) if args.load else None
    if path is None:
        if args.exit_on_missing_checkpoint:
            raise ValueError(f"there is no checkpoint in {args.load}, and --exit-on-missing-checkpoint is given")
        return
    saved = _read(path, args)
    if different := _differences(saved.model, model_flags(args)):
        raise ValueError(f"the checkpoint {path} is of another model: {different}; give its values, or another --load")
    if path.name == RELEASE and not args.finetune:
        raise ValueError(f"the checkpoint {path} is a release, which has weights alone: give --finetune to start with them")
    if not (args.finetune or args.no_load_optim):
        _check_optimizer(args, path, saved)


def model_flags(args: Namespace) -> dict[str, Any]:
    """Flags that decide the shapes and the meaning of the weights."""
    model = {flag_of(name): getattr(args, name) for name in _MODEL_FLAGS}
    return model | {"--disable-bias-linear": not args.add_bias_linear, _VOCABULARY: args.vocab_size}


def schedule_flags(args: Namespace) -> dict[str, Any]:
    """Flags that decide the learning rate and the weight decay of an iteration."""
    return {flag_of(name): getattr(args, name) for name in _SCHEDULE_FLAGS}


def _check_optimizer(args: Namespace, path: Path, saved: _Saved) -> None:
    """Refuse a state of the optimizer that the flags cannot go on with."""
    without = "leave the optimizer's state out with --no-load-optim, or with --finetune, which starts at iteration 0"
    if saved.optimizer is None:
        raise ValueError(f"the checkpoint {path} was saved with --no-save-optim: {without}")
    if saved.sharding != RESHARDABLE:
        raise ValueError(
            f"the checkpoint {path} has the distributed optimizer's state in the form {saved.sharding}, which fits one layout of "
            f"ranks alone: save it once in Megatron-LM with --dist-ckpt-optim-fully-reshardable, or {without}"
        )
    if different := _differences(kind_of_state(saved.optimizer), wanted_kind(args)):
        raise ValueError(f"the checkpoint {path} is of another optimizer: {different}; give its values, or {without}")
    if not has_state(args, saved.tensors):
        raise ValueError(f"the checkpoint {path} was saved before the optimizer's first step, and has no state of it: {without}")
    different = _differences(saved.schedule, schedule_flags(args))
    if different and not (args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler):
        raise ValueError(
            f"the checkpoint {path} has another learning-rate schedule: {different}; give its values, or decide with "
            "--override-opt_param-scheduler (the flags) or --use-checkpoint-opt_param-scheduler (the checkpoint)"
        )


def _read(path: Path, args: Namespace) -> _Saved:
    """All that a checkpoint says of itself; its tensors stay on the disk, but all of them must be there.

    Args:
        args: for flags that a Megatron-LM of another release does not have.
    """
    try:
        common, metadata = contents_of(path)
    except Unreadable as trouble:
        raise damaged(path, str(trouble)) from None
    if (path / SUMMARY).is_file():
        try:
            summary = json.loads((path / SUMMARY).read_text())
            model, schedule = dict(summary["model"]), dict(summary["schedule"])
        except (OSError, ValueError, KeyError, TypeError):
            raise damaged(path, f"is damaged: {SUMMARY} cannot be read") from None
    elif "args" in common:
        model, schedule = _from_megatron(path, common, args)
    else:
        raise damaged(path, f"does not say what model it is of: it has no {SUMMARY}, and common.pt no args")
    sharding = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type", RESHARDABLE)
    return _Saved(model, schedule, common.get("optimizer"), sharding, metadata.state_dict_metadata)


def _from_megatron(path: Path, common: dict[str, Any], here: Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and learning-rate schedule, from Megatron-LM's flags and its scheduler's state."""
    theirs = Namespace(**(vars(here) | vars(common["args"])))
    others = [name for name in _FOREIGN_FLAGS if getattr(theirs, name, None) not in (None, False, 0, [])]
    if others:
        what = ", ".join(f"{flag_of(name)} {getattr(theirs, name)}" for name in others)
        raise ValueError(f"the checkpoint {path} is of a model that this program does not have: {what}; give another --load")
    if not theirs.group_query_attention:
        theirs.num_query_groups = here.num_query_groups  # Megatron-LM sets it to the number of heads
    if theirs.add_bias_linear:
        theirs.add_qkv_bias = here.add_qkv_bias  # which it then sets, too
    # Its size of the vocabulary may leave out tokens that the tokenizer adds.
    padded = getattr(common["args"], "padded_vocab_size", None)
    fits = padded in (None, padded_vocab_size(here.vocab_size, theirs))
    theirs.vocab_size = here.vocab_size if fits else f"of {padded} with padding"
    state = common.get("opt_param_scheduler")
    if state is None:
        return model_flags(theirs), {}
    for name, key in _SCHEDULER.items():
        setattr(theirs, name, state[key])
    for name, key in _SCHEDULER_SAMPLES.items():
        setattr(theirs, name, state[key] / theirs.global_batch_size)
    return model_flags(theirs), schedule_flags(theirs)


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {_shown(value)} there and {_shown(here[name])} here"
        for name, value in saved.items()
        if name in here and value != here[name]
    )


def _shown(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)
