"""Checkpoints of Megatron-LM that another placement can load: those whose optimizer state is saved by parameter.

Megatron-LM saves the distributed optimizer's state by bucket, unless --dist-ckpt-optim-fully-reshardable is given. A bucket has
the parameters of one rank's layers, so another placement cannot read it.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.pipeline.patches.upstream_args import write

from megatron.pipeline.flags.settings import Settings, flat
from megatron.pipeline.model.layout import stage_layers
from megatron.pipeline.schedule.core.names import STOCK
from megatron.pipeline.schedule.core.placement import Placement, interleaved
from megatron.pipeline.session.checkpoints import RESHARDABLE, TRACKER, name_of

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
    """Refuse a checkpoint whose optimizer state is by bucket, and of other layers or buckets on the ranks.

    Args:
        args: as our own program has them.
        placement: of this run.

    Raises:
        ValueError: says what to do.
    """
    if not (args.load and args.use_distributed_optimizer) or args.finetune or args.no_load_optim:
        return
    path = _latest(args)
    if path is None:
        return
    saved = load_common_state_dict(str(path))
    kind = (saved.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    there = saved.get("args")
    if kind is None or kind in _BY_PARAMETER or there is None or getattr(there, "no_save_optim", False):
        return
    schedule = getattr(there, "pipeline_schedule", STOCK)
    if schedule == args.pipeline.schedule or _held(there) == _held(args, placement):
        return
    raise ValueError(
        f"the checkpoint {path} has the distributed optimizer's state by bucket ({kind}), as the ranks held the layers under "
        f"--pipeline-schedule {schedule}, and {args.pipeline.schedule} places them or cuts buckets otherwise: run one iteration "
        f"as before with {_FLAG} and --save, and load what it saves; or give --no-load-optim, which starts the optimizer anew"
    )


def _latest(args: Namespace) -> Path | None:
    """The directory of the checkpoint that upstream will load, if it is one in torch's distributed format."""
    root = Path(args.load)
    try:
        iteration = getattr(args, "ckpt_step", None) or int((root / TRACKER).read_text())
    except (OSError, ValueError):  # none; or a release, of which the weights alone are loaded
        return None
    path = root / name_of(int(iteration))
    return path if (path / ".metadata").is_file() and (path / "metadata.json").is_file() else None


def _held(args: Namespace, placement: Placement | None = None) -> Any:
    """Share of every rank: its stages, their layers, its part of the vocabulary, and whether every rank cuts it into buckets.

    Args:
        args: of this run, or those that upstream has saved, which lack our flags.
        placement: None for that of megatron-core's own schedules.
    """
    given = Settings.of(Namespace(**_NOT_SAVED | flat(args)))
    ours = given.pipeline.schedule != STOCK
    if placement is None:
        if ours:
            return None
        placement = interleaved(given.pipeline_model_parallel_size, given.virtual_pipeline_model_parallel_size or 1)
    return placement, stage_layers(given, placement), given.vocabulary.spread, ours and given.overlap_grad_reduce
