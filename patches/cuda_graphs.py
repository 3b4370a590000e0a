"""megatron.core.transformer.cuda_graphs: layers that Transformer Engine captures, in the order of our plans.

``TECudaGraphHelper.create_cudagraphs``: upstream captures every layer once for each microbatch, in the order of its own
schedules, and gives a microbatch's memory to another one behind its B. A model that a planned schedule trains says how it is
captured (``capture_with``); meanwhile the module's ``get_num_microbatches`` and ``convert_schedule_table_to_order`` answer
for one slot (``model/te_graphs.py``). No setting takes an order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import compat, distributed_data_parallel

_UPSTREAM = "megatron.core.transformer.cuda_graphs"
_CAPTURE = "captures_graphs"


def install() -> None:
    """Wrap it."""
    compat.wrap(compat.module(_UPSTREAM).TECudaGraphHelper, "create_cudagraphs", _by_plan)


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
