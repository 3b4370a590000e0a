"""Which checkpoint ``--load`` takes, what it says of itself, and whether the flags go with it: before anything starts.

A checkpoint is a directory such as ``iter_0000020/`` in torch's distributed format; a tracker file next to it names the latest.
Ours say in ``training.json`` what was saved; those of Megatron-LM have its flags in the common state: the file ``common.pt``, or
from megatron-core 0.19 on an object among the tensors.
"""

from __future__ import annotations

import json
import traceback
from argparse import Namespace
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core import dist_checkpointing
from megatron.pipeline.patches import compat
from torch.distributed.checkpoint import FileSystemReader, Metadata

from megatron.pipeline.flags.flags import flag_of
from megatron.pipeline.session.atomic import UNFINISHED
from megatron.pipeline.session.tokenizer import padded_vocab_size
from megatron.pipeline.trainer.optimizer_state import has_state, kind_of_state, wanted_kind

TRACKER = "latest_checkpointed_iteration.txt"
SUMMARY = "training.json"
FORMAT = "torch_dist"
RESHARDABLE = "fully_reshardable"  # of the distributed optimizer's: the one that another layout can read
_RELEASE = "release"  # weights alone, in Megatron-LM
_VOCABULARY = "the tokenizer's vocabulary"
_LONGEST = 600  # characters of an error's words
_DIGITS = 18  # of an iteration, at most
_PARTS = ("metadata.json", ".metadata", "common.pt")
_COMMON = "common_state"  # what 0.19 and later have in place of the last of these

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
    """What a checkpoint says of itself.

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


def find(directory: str) -> Path | None:
    """The checkpoint to go on from: the one the tracker names, or without a tracker the newest complete one; None if none is.

    Raises:
        ValueError: the tracker names none that can be read; says which other one can be taken, and how.
    """
    try:
        return _find(Path(directory))
    except OSError as error:
        raise ValueError(f"--load {directory} cannot be read: {error.filename}: {error.strerror}") from None


def _find(root: Path) -> Path | None:
    tracker = root / TRACKER
    if root.exists() and not root.is_dir():
        raise ValueError(f"--load {root} is a file: give the directory with the checkpoints")
    if not _wrong(root):
        raise ValueError(f"--load {root} is a checkpoint itself: give the directory that it is in")
    if not tracker.exists() and not tracker.is_symlink():
        return _newest(root)
    try:
        named = tracker.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{tracker} cannot be read ({error}){_instead(root)}") from None
    if named != _RELEASE and not (named.isascii() and named.isdecimal() and len(named) <= _DIGITS):
        raise ValueError(f"{tracker} says {named[:20]!r}, which is no iteration{_instead(root)}")
    path = root / (_RELEASE if named == _RELEASE else name_of(int(named)))
    if not path.exists() and replaced(path).exists():
        path = replaced(path)  # a crash while one of the same iteration took its place
    if wrong := _wrong(path):
        raise damaged(path, wrong)
    return path


def _newest(root: Path) -> Path | None:
    """The newest complete checkpoint of a directory without a tracker; None if nothing there looks like one."""
    if complete := _complete(root):
        return complete[max(complete)]
    damaged = [path for path in (*sorted(root.glob("iter_*")), root / _RELEASE) if path.exists() and path.suffix != UNFINISHED]
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise ValueError(f"--load {root} has no {TRACKER} and no complete checkpoint, but {names}: restore it, or remove {names}")
    return None


def latest(directory: str) -> Path | None:
    """What ``find`` finds; None also where that cannot be read."""
    try:
        return find(directory)
    except ValueError:
        return None


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
    if path.name == _RELEASE and not args.finetune:
        raise ValueError(f"the checkpoint {path} is a release, which has weights alone: give --finetune to start with them")
    if not (args.finetune or args.no_load_optim):
        _check_optimizer(args, path, saved)


def model_flags(args: Namespace) -> dict[str, Any]:
    """What decides the shapes and the meaning of the weights, by flag."""
    model = {flag_of(name): getattr(args, name) for name in _MODEL_FLAGS}
    return model | {"--disable-bias-linear": not args.add_bias_linear, _VOCABULARY: args.vocab_size}


def schedule_flags(args: Namespace) -> dict[str, Any]:
    """What decides the learning rate and the weight decay of an iteration, by flag."""
    return {flag_of(name): getattr(args, name) for name in _SCHEDULE_FLAGS}


def name_of(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def replaced(path: Path) -> Path:
    """Where a checkpoint lies while one of the same iteration takes its place."""
    return path.with_name(f"{path.name}.replaced{UNFINISHED}")


def reason(error: BaseException, frames: traceback.StackSummary | None = None) -> str:
    """What went wrong in one line: the error's kind and words, or where it was raised if it has none.

    Args:
        frames: where, if the error comes from another process and has lost that.
    """
    words = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]  # torch's advice stands before that
    if words:
        return f"{type(error).__name__}: {words[:_LONGEST]}"
    where = frames or traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {where[-1].filename}:{where[-1].lineno}: {where[-1].line}" if where else repr(error)


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
        common, metadata = _contents(path)
    except _Unreadable as trouble:
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


class _Unreadable(Exception):
    """A file of a checkpoint cannot be read, or is cut off."""


def _contents(path: Path) -> tuple[dict[str, Any], Metadata]:
    """A checkpoint's common state and its description of the tensors, which stay on the disk.

    Raises:
        _Unreadable: a file cannot be read, or is cut off.
    """
    name = "common.pt"
    if not (path / name).exists() and not compat.saves_common_state_as_object():
        raise _Unreadable(f"was saved by megatron-core 0.19 or later, and {compat.version()} is installed")
    try:
        common = dict(dist_checkpointing.load_common_state_dict(str(path)))
        name = ".metadata"
        metadata = FileSystemReader(path).read_metadata()
        ends: dict[str, int] = {}
        for part in metadata.storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
        for name, end in ends.items():
            size = (path / name).stat().st_size if (path / name).exists() else 0
            if size < end:
                raise _Unreadable(f"is damaged: {name} has {size} of {end} bytes")
            (path / name).open("rb").close()
    except _Unreadable:
        raise
    except Exception as error:  # pickle has errors of every kind
        raise _Unreadable(f"is damaged: {name} cannot be read ({reason(error)})") from None
    return common, metadata


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


def _complete(root: Path) -> dict[int, Path]:
    found = {path: path.name.removeprefix("iter_") for path in root.glob("iter_*")}
    return {int(number): path for path, number in found.items() if number.isascii() and number.isdecimal() and not _wrong(path)}


def _wrong(path: Path) -> str:
    """What shows at a glance that a directory is no checkpoint that can be read; empty if nothing does."""
    if not path.is_dir():
        return "is missing"
    files = {file.name for file in path.iterdir()}
    if files <= {".metadata"}:  # which no pattern such as * matches
        return "is empty" + ("" if not files else " but for .metadata")
    try:
        form = json.loads((path / _PARTS[0]).read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        form = "torch" if any(file.startswith("mp_rank_") for file in files) else FORMAT
        if files.isdisjoint(_PARTS[::2]) and ".metadata" in files:
            form = "torch_dcp or fsdp_dtensor"
    if form != FORMAT:
        return f"has the format {form}: --load reads {FORMAT}, to which Megatron-LM converts (--ckpt-convert-format)"
    missing = [name for name in _PARTS if name not in files]
    if missing == ["common.pt"] and _COMMON.encode() in (path / ".metadata").read_bytes():
        missing = []
    return f"is damaged: {' and '.join(missing)} missing" if missing else ""


def damaged(path: Path, what: str) -> ValueError:
    """What to say of a checkpoint that cannot be read: what is wrong, and which other one can be taken."""
    return ValueError(f"the checkpoint {path} {what}{_instead(path.parent, path)}")


def _instead(root: Path, damaged: Path | None = None) -> str:
    """Which other checkpoint can be taken, and how."""
    others = sorted(((iteration, path) for iteration, path in _complete(root).items() if path != damaged), reverse=True)
    for readable, path in others:
        with suppress(_Unreadable):
            _contents(path)
            return f"; to go on from iteration {readable}, write {readable} into {root / TRACKER}"
    return f"; {root} has no other: give another --load"


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {_shown(value)} there and {_shown(here[name])} here"
        for name, value in saved.items()
        if name in here and value != here[name]
    )


def _shown(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)
