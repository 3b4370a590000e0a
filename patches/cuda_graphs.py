"""megatron.core.transformer.cuda_graphs: layers are captured by slot, in the order of our plans.

``TECudaGraphHelper.create_cudagraphs``: upstream captures every layer once for each microbatch, in the order of its own
schedules, and gives a microbatch's memory to another one behind its B. A model that a planned schedule trains says how it is
captured (``capture_with``); meanwhile the module's ``get_num_microbatches`` and ``convert_schedule_table_to_order`` answer
for one slot (``model/te_graphs.py``). No setting takes an order.
``CudaGraphManager.__call__`` and ``get_cudagraph_runner``: upstream has a runner for each microbatch, and captures all of them
in one pool, in the order of the first iteration. A manager that ``follow`` has seen has one for each slot, in the slot's pool
(``model/local_graphs.py``), or runs its module as it is. While they are captured (``capture``),
``alloc_tensor_from_graph_mempool`` puts what comes from outside of graphs beside the pools, where it stays. Releases before 0.19
have no such function, and give an input's memory to the next microbatch behind F.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer import MegatronModule
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import compat, distributed_data_parallel

_UPSTREAM = "megatron.core.transformer.cuda_graphs"
_CAPTURE = "captures_graphs"
_FOLLOWS = "follows_slots"  # of a manager


def install() -> None:
    """Wrap them."""
    upstream = compat.module(_UPSTREAM)
    compat.wrap(upstream.TECudaGraphHelper, "create_cudagraphs", _by_plan)
    compat.wrap(upstream.CudaGraphManager, "__call__", _graphed_or_eager)
    compat.wrap(upstream.CudaGraphManager, "get_cudagraph_runner", _runner_of_slot)


def capture_with(chunk: torch.nn.Module, capture: Callable[[Any, Any], None]) -> None:
    """Have a helper of a chunk call ``capture`` with itself and its module in place of ``create_cudagraphs``."""
    setattr(unwrap_model(chunk), _CAPTURE, capture)


def _by_plan(create: Callable[[Any], None], helper: Any) -> None:
    if not any(map(distributed_data_parallel.is_marked, helper.model)):
        create(helper)
    elif capture := getattr(unwrap_model(helper.model[0]), _CAPTURE, None):
        capture(helper, compat.module(_UPSTREAM))
    else:
        raise ValueError("--cuda-graph-warmup-steps must be at least 1: graphs are captured behind an iteration without them")


class _Followed:
    """Runners of a manager by slot, the pools of slots, and the slots of the microbatches to come, in the order of their F."""

    def __init__(self) -> None:
        self.runners: dict[int, Any] = {}
        self.pools: dict[int, Any] = {}
        self.coming: list[int] = []


def keeps_inputs() -> bool:
    """Tell whether this release's managers keep what a forward was given until its backward."""
    return compat.optional(_UPSTREAM, "alloc_tensor_from_graph_mempool") is not None


def is_captured() -> bool:
    """Tell whether upstream's managers have their graphs."""
    return bool(compat.module(_UPSTREAM)._CudagraphGlobalRecord.cudagraph_created)


def follow(manager: Any, slots: Sequence[int], pools: dict[int, Any]) -> bool:
    """Have a manager use the runners of some slots, one for each of its next forwards.

    Args:
        slots: none, and its module runs as it is.
        pools: by slot, of all managers that go by them.

    Returns:
        Whether it has them all, or is yet to capture them: otherwise its module runs as it is.
    """
    own = vars(manager).setdefault(_FOLLOWS, _Followed())
    fits = not is_captured() or own.runners.keys() >= set(slots)
    own.coming, own.pools = list(slots) if fits else [], pools
    for runner in own.runners.values():  # an iteration that was taken back has left some between F and B
        runner.status = compat.module(_UPSTREAM)._GraphStatus.FWD_READY
    return fits


def capture() -> None:
    """Capture what all managers have recorded."""
    upstream: Any = compat.module(_UPSTREAM)
    allocate = upstream.alloc_tensor_from_graph_mempool
    upstream.alloc_tensor_from_graph_mempool = lambda meta: meta.zeros_like()
    try:
        upstream.create_cudagraphs()
    finally:
        upstream.alloc_tensor_from_graph_mempool = allocate


def _graphed_or_eager(call: Callable[..., Any], manager: Any, module: Any, args: Any, kwargs: Any, **options: Any) -> Any:
    own: _Followed | None = vars(manager).get(_FOLLOWS)
    if own is None or own.coming:
        return call(manager, module, args, kwargs, **options)
    return (manager.func or super(MegatronModule, module).__call__)(*args, **kwargs)


def _runner_of_slot(get: Callable[..., Any], manager: Any, *given: Any, **options: Any) -> Any:
    own: _Followed | None = vars(manager).get(_FOLLOWS)
    if own is None:
        return get(manager, *given, **options)
    slot = own.coming.pop(0)
    if slot not in own.runners:
        if slot not in own.pools:
            own.pools[slot] = compat.module(_UPSTREAM).torch.cuda.graph_pool_handle()
        own.runners[slot] = get(manager, *given, **options)
        own.runners[slot].mempool = own.pools[slot]
    return own.runners[slot]
