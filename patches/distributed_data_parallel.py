"""megatron.core.distributed.distributed_data_parallel: gradients and weights are cut into buckets on every rank and chunk.

``DistributedDataParallel.__init__``: upstream makes one bucket of all chunks but the first of the first pipeline rank, as under
its schedules the others have time to reduce it when they are done. Under ours all ranks end together, with a W: one bucket would
be reduced behind it. Chunks that ``mark`` has seen are cut as that first one is, or as a plan has it; no setting does so. Of
weights whose gradients W computes DDP then hears from their modules, behind W (``delay_wgrad_compute``). A program asks for all
gathers of weights where it begins (``gather``), so that no layer starts the next one's (``align_param_gather``). In a loop that
has called ``megatron.pipeline.install`` (``loops``) each chunk is prepared before.
``DistributedOptimizer.compute_full_param_layout``, ``LayerWiseDistributedOptimizer.compute_full_param_layout``: which from 0.18
on Megatron-LM calls before, with its choice of buckets.
"""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import compat, loops

_PATH = "megatron.core.distributed.distributed_data_parallel"
_LAYOUTS = (
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"),
    ("megatron.core.optimizer.layer_wise_optimizer", "LayerWiseDistributedOptimizer"),
)
_MARK = "in_buckets_on_every_rank"  # of a chunk, which may have no parameters, and of each of its parameters
_FIRST = SimpleNamespace(rank=lambda: 0)


def install() -> None:
    """Wrap them."""
    compat.wrap(compat.module(_PATH).DistributedDataParallel, "__init__", _cut)
    for path, name in _LAYOUTS:
        if compat.optional(path, f"{name}.compute_full_param_layout") is not None:
            compat.wrap(getattr(compat.module(path), name), "compute_full_param_layout", _laid_out)


def mark(chunk: torch.nn.Module, buckets: int | None = None) -> None:
    """Have DDP, which is yet to wrap a chunk, cut it into buckets wherever it is.

    Args:
        buckets: how many, as a plan has it; None for those of the size that DDP is given.
    """
    trained = sum(weight.numel() for weight in chunk.parameters() if weight.requires_grad)
    size = max(1, -(-trained // buckets)) if buckets else None
    for one in (chunk, *chunk.parameters()):
        setattr(one, _MARK, size)


def is_marked(chunk: torch.nn.Module) -> bool:
    """Tell whether ``mark`` has seen a chunk, wrapped or not."""
    return hasattr(unwrap_model(chunk), _MARK)


def gather(chunk: torch.nn.Module) -> None:
    """Start all gathers of weights that the last step has left in shards; DDP's hooks of modules wait for each.

    Args:
        chunk: as DDP has wrapped it, or not.
    """
    for group in gathered(chunk):
        if not group.param_gather_dispatched:
            group.start_param_sync()


def gathered(chunk: torch.nn.Module) -> list[Any]:
    """Groups of buckets whose weights DDP gathers for its next forward, in the order in which that forward takes them.

    Args:
        chunk: as DDP has wrapped it, or not; a loop may have taken out DDP's hooks, and gathers itself.
    """
    ddp: Any = chunk
    hooks = getattr(ddp, "use_forward_hook", False) and ddp.remove_forward_pre_hook_handles
    if not hooks or not is_marked(chunk):
        return []
    vocabulary = getattr(unwrap_model(chunk), "vocabulary", None)  # IF comes before all layers
    first = vocabulary.parameters() if vocabulary is not None else ()
    of = ddp.param_to_bucket_group
    return list(dict.fromkeys(of[parameter] for parameter in (*first, *chunk.parameters()) if parameter in of))


def start_when_finished(chunk: torch.nn.Module) -> None:
    """Have ``finish_grad_sync`` reduce all gradients of a chunk: no pass has. DDP learns anew when a bucket is complete."""
    for group in (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())):
        group.is_first_batch = True


def _cut(
    build: Any, ddp: Any, config: Any, ddp_config: Any, module: Any, disable_bucketing: bool = False, *rest: Any, **options: Any
) -> None:
    own = copy(ddp_config)  # the caller's stays as it is: loops set functions by it
    if loops.current is not None and not is_marked(module):
        loops.current.prepare(unwrap_model(module), own)
    if not is_marked(module):
        build(ddp, config, ddp_config, module, disable_bucketing, *rest, **options)
        return
    groups, found = compat.module(_PATH).ProcessGroupCollection, []
    setup = groups.setup_process_groups_for_ddp

    def as_first(*given: Any) -> dict[str, Any]:
        found.append(setup(*given))
        return found[0] | {"pp_group": _FIRST}

    own.align_param_gather, own.delay_wgrad_compute = own.overlap_param_gather, True
    given, planned = own.bucket_size, getattr(unwrap_model(module), _MARK)
    own.bucket_size = planned or given
    groups.setup_process_groups_for_ddp = staticmethod(as_first)
    try:
        build(ddp, config, own, module, False, *rest, **options)
    finally:
        groups.setup_process_groups_for_ddp = staticmethod(setup)
    ddp.pp_group = found[0]["pp_group"]
    if ddp.bucket_size != own.bucket_size:
        raise RuntimeError(
            f"megatron-core {compat.version()} cuts a chunk into buckets of {ddp.bucket_size} elements, and not of "
            f"{own.bucket_size}, as it does on the first pipeline rank; {compat.ADVICE}"
        )
    if planned:  # an optimizer asks that all its chunks have the same configuration
        own.bucket_size = given


def _laid_out(compute: Any, parameters: Any, bucket_size: Any, replicas: int, ddp_config: Any, *rest: Any, **options: Any) -> Any:
    planned = [getattr(one, _MARK) for one in parameters if hasattr(one, _MARK)]
    size = ddp_config.bucket_size if loops.current is not None or planned else bucket_size
    return compute(parameters, next(filter(None, planned), size), replicas, ddp_config, *rest, **options)
