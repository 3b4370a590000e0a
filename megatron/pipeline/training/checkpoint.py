"""Checkpoints: written beside the last one and put in place by a rename, so that a crash leaves a usable one.

The layout is Megatron's: ``iter_0000020/`` in torch's distributed format, with ``latest_checkpointed_iteration.txt``
beside it. Tensors carry global names, so a checkpoint loads under another pipeline size, placement or schedule.
``training.json`` in the directory says what was saved; ``check`` reads it before any process group exists.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from megatron.pipeline.schedule.placement import Placement
from megatron.pipeline.training.atomic import UNFINISHED, sync, write_text
from megatron.pipeline.training.flags import OFF
from megatron.pipeline.training.optimizer_state import allocate_state
from megatron.pipeline.training.state import Training

TRACKER = "latest_checkpointed_iteration.txt"
_SUMMARY = "training.json"

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


def latest(directory: str) -> Path | None:
    """The checkpoint to go on from: the one the tracker names, or else the newest complete one; None if none is."""
    root = Path(directory)
    complete = {path.name: path for path in root.glob("iter_*") if (path / _SUMMARY).is_file() and _is_final(path)}
    try:
        named = _name(int((root / TRACKER).read_text()))
    except (OSError, ValueError):
        named = ""
    return complete.get(named) or (complete[max(complete)] if complete else None)


def check(args: Namespace) -> None:
    """Compare the flags with the checkpoint that ``--load`` would read.

    Raises:
        ValueError: it is of another model, has no optimizer that could go on, or another learning-rate schedule.
    """
    path = latest(args.load) if args.load else None
    if path is None:
        return
    saved = _read_summary(path)
    different = _differences(saved["model"], _model(args))
    if different:
        raise ValueError(f"the checkpoint {path} is of another model: {different}; give its values, or another --load")
    if args.finetune or args.no_load_optim:
        return
    if not saved["optimizer"]:
        raise ValueError(f"the checkpoint {path} was saved with --no-save-optim: give --no-load-optim or --finetune")
    different = _differences(saved["schedule"], _schedule(args))
    if different and not (args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler):
        raise ValueError(
            f"the checkpoint {path} has another learning-rate schedule: {different}; give its values, or decide with "
            "--override-opt_param-scheduler (the flags) or --use-checkpoint-opt_param-scheduler (the checkpoint)"
        )


def check_release(args: Namespace, placement: Placement) -> None:
    """Refuse checkpoints that an older release of megatron-core cannot read back.

    Raises:
        ValueError: says which release can, and what works with this one.
    """
    newer = importlib.util.find_spec("megatron.core.dist_checkpointing.strategies.checkpointable") is not None
    if newer or not (args.save or args.load):
        return
    needs = (
        f"needs megatron-core 0.15 or later, and {megatron.core.__version__} is installed: pip install 'megatron-core~=0.16.0', "
    )
    if args.use_distributed_optimizer:
        raise ValueError(f"a checkpoint with --use-distributed-optimizer {needs}or leave that flag out")
    first, last = placement.home(0), placement.home(placement.last_stage)
    tied = not args.untie_embeddings_and_output_weights and args.vocab_parallel == OFF
    if tied and first != last and first[0] == last[0]:
        raise ValueError(
            f"a checkpoint of tied embeddings with both copies on one rank, as a V has them, {needs}or give "
            "--untie-embeddings-and-output-weights, or a schedule with the ends on different ranks, such as zb-h1"
        )


def _read_summary(path: Path) -> dict[str, Any]:
    missing = [name for name in (".metadata", "common.pt") if not (path / name).is_file()]
    if missing:
        what = f"{' and '.join(missing)} missing"
        raise ValueError(f"the checkpoint {path} is damaged: {what}; remove it to go on from an older one")
    try:
        saved = json.loads((path / _SUMMARY).read_text())
        if saved["model"].keys() and saved["schedule"].keys() and isinstance(saved["optimizer"], bool):
            return dict(saved)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"the checkpoint {path} is damaged: {_SUMMARY} cannot be read; remove it to go on from an older one")


def save(args: Namespace, training: Training) -> Path:
    """Write the training's state to ``--save``; a collective over all ranks. Returns the checkpoint's directory.

    Raises:
        RuntimeError: it could not be written; the message names the last checkpoint, which is untouched.
    """
    root = Path(args.save)
    final = root / _name(training.iteration)
    unfinished = final.with_name(final.name + UNFINISHED)
    try:
        if torch.distributed.get_rank() == 0:
            _remove_leftovers(root)
            unfinished.mkdir(parents=True)
        torch.distributed.barrier()
        with _gathered_parameters(args, training):
            state = _sharded_state(training, with_optimizer=not args.no_save_optim, is_loading=False)
            dist_checkpointing.save(state, str(unfinished), ("torch_dist", 1))
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            write_text(unfinished / _SUMMARY, json.dumps(_summary(args, training), indent=2))
            _put_in_place(unfinished, final)
            write_text(root / TRACKER, str(training.iteration))
        torch.distributed.barrier()
    # The writer has errors of many kinds, torch's own not even an Exception, and each of them must name what is left.
    except (Exception, CheckpointException) as error:
        usable = latest(args.save)
        left = f"the checkpoint {usable} is complete and unchanged" if usable else "there is no earlier checkpoint"
        raise RuntimeError(f"the checkpoint {final} could not be written ({_reason(error)}); {left}") from error
    return final


def _reason(error: BaseException) -> str:
    """What went wrong, without the tracebacks that torch's exception prints for every rank."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
    return str(error)


def load(args: Namespace, training: Training) -> Path | None:
    """Go on from the newest checkpoint in ``--load``; a collective over all ranks. Returns its directory, if any.

    ``check`` must have accepted it.
    """
    path = latest(args.load) if args.load else None
    if path is None:
        return None
    with_optimizer = not (args.finetune or args.no_load_optim)
    if with_optimizer:
        allocate_state(training.optimizer)
    with _gathered_parameters(args, training):
        wanted = _sharded_state(training, with_optimizer, is_loading=True)
        found = dist_checkpointing.load(wanted, str(path))
    for key, chunk in _chunks(training):
        chunk.load_state_dict(found[key])
    if with_optimizer:
        training.optimizer.load_state_dict(found["optimizer"])
        training.scheduler.load_state_dict(found["opt_param_scheduler"])
    else:
        training.optimizer.reload_model_params()
    if not args.finetune:
        training.iteration, training.consumed_samples = found["iteration"], found["consumed_samples"]
    return path


def _sharded_state(training: Training, with_optimizer: bool, is_loading: bool) -> dict[str, Any]:
    """The state as megatron-core's sharded tensors, by global name, and a few plain values."""
    metadata = {
        # The one format of the distributed optimizer's state that another pipeline or data-parallel size can read.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state: dict[str, Any] = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in _chunks(training)}
    if with_optimizer:
        state["optimizer"] = training.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    if not is_loading:
        state["opt_param_scheduler"] = training.scheduler.state_dict()
        state["iteration"] = training.iteration
        state["consumed_samples"] = training.consumed_samples
    return state


def _chunks(training: Training) -> Iterator[tuple[str, Any]]:
    several = len(training.chunks) > 1
    for number, chunk in enumerate(unwrap_model(training.chunks)):
        yield f"model{number}" if several else "model", chunk


@contextmanager
def _gathered_parameters(args: Namespace, training: Training) -> Iterator[None]:
    """With ``--overlap-param-gather`` parameters arrive during the next forward: fetch them all now."""
    if args.overlap_param_gather:
        for chunk in training.chunks:
            chunk.disable_forward_pre_hook()
    yield
    if args.overlap_param_gather:
        for chunk in training.chunks:
            chunk.enable_forward_pre_hook()


def _summary(args: Namespace, training: Training) -> dict[str, Any]:
    return {
        "iteration": training.iteration,
        "consumed_samples": training.consumed_samples,
        "optimizer": not args.no_save_optim,
        "model": _model(args),
        "schedule": _schedule(args),
    }


def _model(args: Namespace) -> dict[str, Any]:
    """What decides the shapes and the meaning of the weights, by flag."""
    model = {_flag(name): getattr(args, name) for name in _MODEL_FLAGS}
    return model | {"--disable-bias-linear": not args.add_bias_linear, "the tokenizer's vocabulary": args.vocab_size}


def _schedule(args: Namespace) -> dict[str, Any]:
    """What decides the learning rate and the weight decay of an iteration, by flag."""
    return {_flag(name): getattr(args, name) for name in _SCHEDULE_FLAGS}


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value} there and {here[name]} here" for name, value in saved.items() if value != here[name])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def _is_final(path: Path) -> bool:
    return not path.name.endswith(UNFINISHED)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"iter_*{UNFINISHED}"):
        shutil.rmtree(path)


def _put_in_place(unfinished: Path, final: Path) -> None:
    """Make a written directory durable and give it its name, replacing an older one of the same iteration."""
    for path in (*unfinished.rglob("*"), unfinished):
        sync(path)
    replaced = final.with_name(f"{final.name}.replaced{UNFINISHED}")
    if final.exists():
        final.rename(replaced)
    unfinished.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
