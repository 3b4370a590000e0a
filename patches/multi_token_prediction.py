"""megatron.core.transformer.multi_token_prediction (after 0.19): layers for further tokens without Transformer Engine.

``is_inference_column_parallel_linear``: upstream asks each linear of such a layer whether it is of two classes, which it derives
from Transformer Engine's. Without that they are no classes, and every model with such a layer fails. Here no linear is of them.
"""

from __future__ import annotations

from typing import Any

from megatron.pipeline.patches import compat

_PATH, _NAME = "megatron.core.transformer.multi_token_prediction", "is_inference_column_parallel_linear"


def install() -> None:
    module = compat.module(_PATH)
    if compat.optional(_PATH, _NAME) is not None and not module.HAVE_TE:
        compat.wrap(module, _NAME, _never)


def _never(_asks: Any, _linear: Any) -> bool:
    return False
