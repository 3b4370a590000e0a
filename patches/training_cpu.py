"""megatron.training without a GPU: what ``cpu.py`` does for megatron.core.

Where no GPU is available (and only there)
- every module of ``megatron.training`` gets a view of ``torch`` whose ``cuda`` is one device, the CPU: upstream asks for one
  before it does anything else;
- the sums of lengths of packed sequences are on the CPU from the start;
- ``megatron.legacy.fused_kernels.load``, which looks for a CUDA compiler in releases before 0.17, does nothing.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from megatron.pipeline.patches import compat, cpu


def install() -> None:
    """Redirect megatron.training to the CPU if there is no GPU; do nothing otherwise."""
    if torch.cuda.is_available():
        return
    view: Any = cpu.view_of_torch()
    view.cuda.is_available = lambda: True
    view.cuda.get_device_properties = lambda *_: SimpleNamespace(name="CPU", major=8, minor=0, total_memory=0)
    if compat.has_module(kernels := "megatron.legacy.fused_kernels"):
        compat.module(kernels).load = lambda _args: None
    importlib.import_module("megatron.training")
    if compat.optional(loop := "megatron.training.training", "update_seqlen_stats_from_cu_seqlens"):
        # Upstream would put it on the GPU that it finds in the view.
        compat.module(loop)._seqlen_stats_in_iteration = torch.zeros(2, dtype=torch.float64)
    if compat.has_module(models := "megatron.training.models.dist_utils"):
        importlib.import_module(models)  # else scripts import it later, without the view
    cpu.give_view(view, "megatron.training", "megatron.legacy")
