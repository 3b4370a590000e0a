"""megatron.training.utils: which ranks read data, and which part of it tensor-parallel ranks broadcast.

``is_first_or_last_pipeline_stage``: asks the placement.
``get_batch_on_this_tp_rank``, which is ``megatron.core.utils``'s from 0.18 on: on a rank with both ends of the model, as on the
first of a V, or with a shard of the vocabulary, all of the batch is broadcast, not the part that the first stage uses.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.pipeline.patches import compat
from megatron.pipeline.patches.upstream_args import written


def install(hooks: Any) -> None:
    utils: Any = compat.module("megatron.training.utils")

    def batch(original: Any, *given: Any, **options: Any) -> Any:
        if not hooks.shares_whole_batches:
            return original(*given, **options)
        signature = inspect.signature(original)
        if "mtp_on_this_rank" in signature.parameters:
            call = signature.bind(*given, **options)
            call.arguments["mtp_on_this_rank"] = True  # a rank for further tokens needs all of a batch, too
            return original(*call.args, **call.kwargs)
        with written(utils.get_args(), pipeline_model_parallel_size=1):
            return original(*given, **options)

    for path, name, replacement in (
        ("megatron.core.utils", "get_batch_on_this_tp_rank", batch),
        ("megatron.training.utils", "get_batch_on_this_tp_rank", batch),
        ("megatron.training.utils", "is_first_or_last_pipeline_stage", hooks.needs_data),
    ):
        if compat.optional(path, name) is not None:
            compat.wrap(compat.module(path), name, replacement)
