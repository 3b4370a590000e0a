"""megatron.core.utils: which part of a batch tensor-parallel ranks broadcast, from 0.18 on (``training_utils.py``: before).

``get_batch_on_this_tp_rank``: on a rank with both ends of the model, as on the first of a V, or with a shard of the vocabulary,
all of the batch is broadcast, not the part that the first stage uses.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from megatron.pipeline.patches import compat
from megatron.pipeline.patches.hooks import Hooks


def install(hooks: Hooks) -> None:
    """Wrap it, if this release has it."""
    path, name = "megatron.core.utils", "get_batch_on_this_tp_rank"
    if (get_batch := compat.optional(path, name)) is None:
        return
    signature = inspect.signature(get_batch)

    def batch(original: Any, *given: Any, **options: Any) -> Any:
        call = signature.bind(*given, **options)
        if hooks.shares_whole_batches:
            call.arguments["mtp_on_this_rank"] = True  # a rank for further tokens needs all of a batch, too
        return original(*call.args, **call.kwargs)

    compat.wrap(compat.importers(importlib.import_module(path), name), name, batch)
