"""megatron.core.transformer.moe.moe_utils: routers where Transformer Engine is not installed.

``te_general_gemm``: upstream asks whether it is None, but does not define it without Transformer Engine, so that every router
fails. Here it is None, and the router multiplies by torch.
``get_moe_layer_wise_logging_tracker``: upstream adds up auxiliary losses by layer in a global, for logs. From 0.18 on that is
``megatron.core.transformer.moe.moe_logging``'s, and this name gives a copy.
"""

from __future__ import annotations

from megatron.pipeline.patches import compat


def install() -> None:
    utils = compat.module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None  # type: ignore[attr-defined]


def forget_auxiliary_losses() -> None:
    """Drop what an earlier model left in upstream's sums, which may have had fewer layers."""
    new = compat.optional("megatron.core.transformer.moe.moe_utils", "get_moe_metrics_tracker")
    if new is None:
        compat.get("megatron.core.transformer.moe.moe_utils", "get_moe_layer_wise_logging_tracker")().clear()
    else:
        logging = "megatron.core.transformer.moe.moe_logging"
        compat.get(logging, "set_moe_metrics_tracker")(compat.get(logging, "MoEMetricsTracker")())
