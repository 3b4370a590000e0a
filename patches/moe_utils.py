"""megatron.core.transformer.moe.moe_utils: routers without Transformer Engine, and auxiliary losses of ranks without experts.

``te_general_gemm``: upstream asks whether it is None, but does not define it without Transformer Engine, so that every router
fails. Here it is None, and the router multiplies by torch.
``get_moe_layer_wise_logging_tracker``: upstream adds up auxiliary losses by layer in a global, for logs. From 0.18 on that is
``megatron.core.transformer.moe.moe_logging``'s, and this name gives a copy.
``track_moe_metrics``: up to 0.16 a pipeline rank without experts makes sums of ``num_layers``, and others have those of
multi-token prediction, too, so that adding them up over the pipeline hangs or adds garbage. Here all have as many.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.pipeline.patches import compat

from megatron.pipeline.distributed.device import this_device


def install() -> None:
    utils = compat.module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None  # type: ignore[attr-defined]
    if not hasattr(utils, "get_moe_metrics_tracker"):
        compat.wrap(utils, "track_moe_metrics", _track)


def _track(original: Any, *args: Any, **options: Any) -> None:
    layers = (options.get("num_layers") or 0) + (options.get("mtp_num_layers") or 0)
    sums = compat.get("megatron.core.transformer.moe.moe_utils", "get_moe_layer_wise_logging_tracker")()
    for name in options.get("track_names") or () if options.get("force_initialize") else ():
        groups = dict.fromkeys(("reduce_group", "avg_group"))
        sums.setdefault(name, {"values": torch.zeros(layers, device=this_device()), **groups, "reduce_group_has_dp": False})
    original(*args, **options)


def exchange_auxiliary_losses(other: Any = None) -> Any:
    """Upstream's sums of auxiliary losses by layer; from here on it adds to others, or without any to new ones."""
    new = compat.optional("megatron.core.transformer.moe.moe_utils", "get_moe_metrics_tracker")
    if new is not None:
        logging, before = "megatron.core.transformer.moe.moe_logging", new()
        compat.get(logging, "set_moe_metrics_tracker")(other or compat.get(logging, "MoEMetricsTracker")())
        return before
    sums = compat.get("megatron.core.transformer.moe.moe_utils", "get_moe_layer_wise_logging_tracker")()
    kept = dict(sums)
    sums.clear()
    sums.update(other or {})
    return kept
