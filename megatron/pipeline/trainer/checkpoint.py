"""Checkpoints: written next to the last one and put in place by a rename, so that a crash leaves a usable one.

The layout is Megatron-LM's, which loads them, as they load its own (``session/checkpoints.py`` finds, ``checkpoint_files.py``
checks them). Tensors carry global names, so a checkpoint loads under another pipeline size, placement or schedule.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches.torch_checkpoint import CheckpointError
from torch.distributed.checkpoint.api import CheckpointException

from megatron.pipeline.distributed.groups import barrier, done_by_rank_0
from megatron.pipeline.flags.settings import flat
from megatron.pipeline.session import save_lock
from megatron.pipeline.session.atomic import UNFINISHED, sync, write_text
from megatron.pipeline.session.checkpoint_failures import bytes_to_write, free_bytes, reading, reason_of, why
from megatron.pipeline.session.checkpoints import FORMAT, RESHARDABLE, TRACKER, find, latest, name_of, replaced
from megatron.pipeline.session.metrics import training_flops
from megatron.pipeline.trainer.checkpoint_files import SUMMARY, model_flags, schedule_flags
from megatron.pipeline.trainer.optimizer_state import load_state, sharded_state
from megatron.pipeline.trainer.state import Training

# What upstream's sharded state depends on: the form of the distributed optimizer's that another layout of ranks can read.
_FORM = {"distrib_optim_sharding_type": RESHARDABLE, "chained_optim_avoid_prefix": True, "singleton_local_shards": False}


def save(args: Namespace, training: Training) -> Path:
    """Write the training's state to ``--save``; a collective over all ranks. Returns the checkpoint's directory.

    Raises:
        RuntimeError: it could not be written; the message says why, on every rank where torch tells rank 0 alone, and names the
            last checkpoint, which is untouched.
    """
    root = Path(args.save)
    final = root / name_of(training.iteration)
    unfinished = final.with_name(final.name + UNFINISHED)
    needed = 0

    def begin() -> None:
        save_lock.check(args.save)
        for leftover in root.glob(f"iter_*{UNFINISHED}"):
            shutil.rmtree(leftover)
        unfinished.mkdir(parents=True)

    def check_space() -> None:
        if free_bytes(root) < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def end() -> None:
        progress = {"iteration": training.iteration, "consumed_samples": training.consumed_samples}
        summary = progress | {"model": model_flags(args), "schedule": schedule_flags(args)}
        write_text(unfinished / SUMMARY, json.dumps(summary, indent=2))
        _put_in_place(unfinished, final)
        write_text(root / TRACKER, str(training.iteration))

    try:
        done_by_rank_0(begin)
        with _gathered_parameters(args, training):
            state = training_state(training, with_optimizer=not args.no_save_optim, is_loading=False)
            state |= _common_state(args, training)
            needed = bytes_to_write(state)
            done_by_rank_0(check_space)
            dist_checkpointing.save(state, str(unfinished), (FORMAT, 1), content_metadata=_FORM)
        barrier()
        done_by_rank_0(end)
    # The writer has errors of many kinds, torch's own not even an Exception. Each message must name the checkpoint that remains.
    except (Exception, CheckpointException) as error:
        words = why(error, unfinished, needed)
        usable = latest(args.save)
        left = f"the checkpoint {usable} is complete and unchanged" if usable else "there is no earlier checkpoint"
        raise RuntimeError(f"the checkpoint {final} could not be written ({words}); {left}") from error
    return final


def load(args: Namespace, training: Training) -> Path | None:
    """Go on from the checkpoint in ``--load``; a collective over all ranks. Returns its directory, if there is one.

    ``checkpoint_files.check`` must have accepted it.

    Raises:
        RuntimeError: it does not fit all the same.
    """
    # One rank decides: meanwhile another training may save there, and each rank would take whichever was the newest.
    decided = [find(args.load) if args.load and torch.distributed.get_rank() == 0 else None]
    if args.load:
        torch.distributed.broadcast_object_list(decided, src=0)
    (path,) = decided
    if path is None:
        return None
    try:
        with reading(path):
            _load(args, training, path)
    except CheckpointError as error:
        raise RuntimeError(str(error)) from error
    except Exception as error:
        raise RuntimeError(f"the checkpoint {path} could not be loaded ({reason_of(error)})") from error
    return path


def _load(args: Namespace, training: Training, path: Path) -> None:
    with_optimizer = not (args.finetune or args.no_load_optim)
    with _gathered_parameters(args, training):
        wanted = training_state(training, with_optimizer, is_loading=True)
        found = dist_checkpointing.load(wanted, str(path))
    for key, chunk in _chunks(training):
        chunk.load_state_dict(found[key])
    if with_optimizer:
        load_state(training.optimizer, found["optimizer"])
        if args.use_distributed_optimizer and not args.overlap_param_gather:  # which gathers them in the first forward
            # In float32 a replica has its own main parameters as weights now, and the others' as precise as the checkpoint's.
            for chunk in training.chunks:
                chunk.start_param_sync()
        training.scheduler.load_state_dict(found["opt_param_scheduler"])
    else:
        training.optimizer.reload_model_params()
    if not args.finetune:
        training.iteration = found["iteration"]
        # Checkpoints without arguments have the samples in a file of their own.
        training.consumed_samples = found["args"].consumed_train_samples if "args" in found else found["consumed_samples"]


def training_state(training: Training, with_optimizer: bool, is_loading: bool) -> dict[str, Any]:
    """The state as megatron-core's sharded tensors, by global name, and a few plain values."""
    metadata = _FORM | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in _chunks(training)}
    if with_optimizer:
        state["optimizer"] = sharded_state(training.optimizer, state, is_loading, metadata)
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


def _common_state(args: Namespace, training: Training) -> dict[str, Any]:
    """State that is no tensor, by the names that Megatron-LM looks for; most flags have its names already."""
    arguments = flat(args) | {
        "world_size": torch.distributed.get_world_size(),
        "add_position_embedding": True,  # whichever kind
        "consumed_train_samples": training.consumed_samples,
        "no_save_rng": True,  # dropout follows from the seed, not from a generator's state
    }
    state = {
        "args": Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": training.iteration,
        "num_floating_point_operations_so_far": training_flops(args, training.consumed_samples),
    }
    return state if args.no_save_optim else state | {"opt_param_scheduler": training.scheduler.state_dict()}


def _put_in_place(unfinished: Path, final: Path) -> None:
    """Make a written directory durable and give it its name, replacing an older one of the same iteration."""
    for path in (*unfinished.rglob("*"), unfinished):
        sync(path)
    if final.exists():
        final.rename(replaced(final))
    unfinished.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced(final), ignore_errors=True)
