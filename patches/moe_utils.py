"""megatron.core.transformer.moe.moe_utils: routers where Transformer Engine is not installed.

``te_general_gemm``: upstream asks whether it is None, but does not define it without Transformer Engine, so that every router
fails. Here it is None, and the router multiplies by torch.
"""

from __future__ import annotations

from megatron.pipeline.patches import compat


def install() -> None:
    """Define the name where it is missing."""
    utils = compat.module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None  # type: ignore[attr-defined]
