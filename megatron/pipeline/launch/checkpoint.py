"""Checkpoints of Megatron-LM: how they are saved, and which of them a placement can load.

Megatron-LM saves the distributed optimizer's state by bucket, unless --dist-ckpt-optim-fully-reshardable is given. A bucket has
the parameters of one rank's layers, so another placement cannot read it. In formats other than ``torch_dist`` the weights, too,
are those of a rank's chunks.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.pipeline.patches.torch_checkpoint import CheckpointError
from megatron.pipeline.patches.upstream_args import write

from megatron.pipeline.distributed.groups import barrier, done_by_rank_0
from megatron.pipeline.flags.settings import Settings, flat
from megatron.pipeline.model.layout import stage_layers
from megatron.pipeline.planner import STOCK, Placement, counted, interleaved
from megatron.pipeline.session.atomic import UNFINISHED, write_text
from megatron.pipeline.session.checkpoint_failures import is_whole, reading, writing
from megatron.pipeline.session.checkpoints import RESHARDABLE, TRACKER, fault, name_of, replaced

_FLAG = "--dist-ckpt-optim-fully-reshardable"
_BY_PARAMETER = (RESHARDABLE, "fully_sharded_model_space")  # not by bucket
_NOT_SAVED = {
    "pipeline_schedule": STOCK,
    "mtp_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "overlap_grad_reduce": False,
}


def save_by_parameter(args: Namespace) -> bool:
    """Have the distributed optimizer's state saved so that any schedule can load it; returns whether this changes a flag."""
    local = getattr(args, "non_persistent_ckpt_type", None) == "local"  # which upstream saves by bucket alone
    changes = bool(args.use_distributed_optimizer and args.save and not args.dist_ckpt_optim_fully_reshardable and not local)
    if changes:
        write(args, dist_ckpt_optim_fully_reshardable=True)
    return changes


def check_placement(args: Settings, placement: Placement) -> None:
    """Refuse a checkpoint of other letters, or whose optimizer state is by bucket, and of other layers or buckets on the ranks.

    Args:
        args: as our own program has them.
        placement: of this run.

    Raises:
        ValueError: says what to do.
    """
    pattern, by_bucket = getattr(args, "hybrid_layer_pattern", None), args.use_distributed_optimizer
    by_bucket = by_bucket and not (args.finetune or args.no_load_optim)
    if not (args.load and (pattern or by_bucket)):
        return
    path = latest(args)
    if path is None or not ((path / ".metadata").is_file() and (path / "metadata.json").is_file()):
        return
    with reading(path):
        saved = load_common_state_dict(str(path))
    kind = (saved.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    there = saved.get("args")
    if (other := getattr(there, "hybrid_layer_pattern", None)) and _letters(other) != _letters(pattern):
        ours = f"--hybrid-layer-pattern {pattern}" if pattern else "a GPT"
        raise ValueError(
            f"the checkpoint {path} is of --hybrid-layer-pattern {other}, and this model of {ours}: load one of these layers"
        )
    if not by_bucket or kind is None or kind in _BY_PARAMETER or there is None or getattr(there, "no_save_optim", False):
        return
    schedule = getattr(there, "pipeline_schedule", STOCK)
    if schedule == args.pipeline.schedule or _held(there) == _held(args, placement):
        return
    raise ValueError(
        f"the checkpoint {path} has the distributed optimizer's state by bucket ({kind}), as the ranks held the layers under "
        f"--pipeline-schedule {schedule}, and {args.pipeline.schedule} places them or cuts buckets otherwise: run one iteration "
        f"as before with {_FLAG} and --save, and load what it saves; or give --no-load-optim, which starts the optimizer anew"
    )


def _letters(pattern: str | None) -> str:
    return (pattern or "").partition("/")[0].replace("|", "")


def check_chunks(args: Settings, placement: Placement, state: dict[str, Any], path: str) -> None:
    """Refuse weights by chunk, as all formats but ``torch_dist`` have them, of other chunks than this run's.

    Args:
        args: as our own program has them.
        placement: of this run.
        state: what was read for this rank.
        path: of the file or directory that it was read from.

    Raises:
        CheckpointError: says what to do.
    """
    there, here = state.get("args"), args.pipeline.schedule
    schedule = getattr(there, "pipeline_schedule", STOCK)
    names = [f"model{chunk}" for chunk in range(placement.chunks)] if placement.chunks > 1 else ["model"]
    if there is None or schedule == here == STOCK:
        same = placement == interleaved(placement.ranks, placement.chunks)
    elif (held := _held(there)) is None:
        same = schedule == here
    else:
        same = held[:3] == _held(args, placement)[:3]  # the layers, and the part of the vocabulary
    if same and state.keys() >= set(names):
        return
    count = sum(name.removeprefix("model").isdecimal() for name in state) or 1
    raise CheckpointError(
        f"the checkpoint {path} has weights by rank and chunk as --pipeline-schedule {schedule} places {counted(count, 'chunk')} "
        f"on a rank, and {here} places {counted(placement.chunks, 'chunk')}, or others: load it as it was written, with "
        "--ckpt-convert-format torch_dist and --ckpt-convert-save DIR, and then load what that saves"
    )


@contextmanager
def replacing(path: Path, form: str) -> Iterator[None]:
    """``writing`` of a checkpoint by Megatron-LM, which writes over an older one of the same iteration: that is kept until the
    new one is whole. If it fails, nothing is left of the new one, and the tracker names the one that it named. Collective over
    the world.

    Args:
        form: its format.

    Raises:
        CheckpointError: see ``writing``.
    """
    tracker = path.parent / TRACKER

    def begin() -> str | None:
        if path.is_dir() and any(path.iterdir()):
            if replaced(path).exists():  # a run was killed while it wrote: which of the two is whole is kept
                shutil.rmtree(path if fault(path) else replaced(path))
            if path.is_dir():
                path.rename(replaced(path))
        return tracker.read_text() if tracker.is_file() else None

    def meet() -> None:
        if form == "torch" and (tracker.read_text() if tracker.is_file() else None) == named:
            barrier()  # each rank writes a file; those that could wait for all others' here,
            barrier()  # and, when one has written the tracker, here

    named = done_by_rank_0(begin)
    try:
        with writing(path, meet=meet):
            yield
    except BaseException as error:
        if is_whole(path, error):
            raise
        shutil.rmtree(path.with_name(path.name + UNFINISHED), ignore_errors=True)
        with suppress(OSError):  # other ranks do so, too
            if named is None:
                tracker.unlink()
            elif tracker.read_text() != named:
                write_text(tracker, named)
        raise
    barrier()  # a rank that fails puts back what was kept
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(replaced(path), ignore_errors=True)


def latest(args: Any) -> Path | None:
    """The directory of the checkpoint that upstream will load, whether it is there or not; None if there is to be none, or a
    release, of which the weights alone are loaded.
    """
    if not args.load:
        return None
    root = Path(args.load)
    try:
        return root / name_of(int(getattr(args, "ckpt_step", None) or (root / TRACKER).read_text()))
    except (OSError, ValueError):
        return None


def _held(args: Namespace, placement: Placement | None = None) -> Any:
    """Share of every rank: its stages, their layers, its part of the vocabulary, and the schedule that cuts it into buckets.

    Args:
        args: of this run, or those that upstream has saved, which lack our flags.
        placement: None for that which was saved, or else for that of megatron-core's own schedules.
    """
    given = Settings.of(Namespace(**_NOT_SAVED | flat(args)))
    ours = given.pipeline.schedule != STOCK
    if placement is None:
        stages = getattr(args, "pipeline_placement", None)
        if ours and stages is None:  # of a release that did not save it
            return None
        sizes = given.pipeline_model_parallel_size, given.virtual_pipeline_model_parallel_size or 1
        placement = Placement(stages) if stages else interleaved(*sizes)
    cuts_buckets = ours and given.overlap_grad_reduce and given.pipeline.schedule
    return placement, stage_layers(given, placement), given.vocabulary.spread, cuts_buckets
