"""megatron.training.utils: which ranks read data, and which part of it tensor-parallel ranks broadcast.

``is_first_or_last_pipeline_stage``: asks the placement. (Releases before 0.15 have none: their scripts read on the first and the
last rank, which every placement that trains can do with.)
``get_batch_on_this_tp_rank``, which is megatron.core's from 0.18 on (``core_utils.py``): on a rank with both ends of the model,
as on the first of a V, or with a shard of the vocabulary, all of the batch is broadcast, not the part that the first stage uses.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.pipeline.patches import compat
from megatron.pipeline.patches.hooks import Hooks


def install(hooks: Hooks) -> None:
    """Wrap both."""
    utils: Any = compat.module("megatron.training.utils")

    def batch(get_batch: Any, data: Any, *rest: Any, **options: Any) -> Any:
        if not hooks.shares_whole_batches:
            return get_batch(data, *rest, **options)
        if "mtp_on_this_rank" in inspect.signature(get_batch).parameters:
            return get_batch(data, mtp_on_this_rank=True)  # a rank for further tokens needs all of a batch, too
        args = utils.get_args()
        size, args.pipeline_model_parallel_size = args.pipeline_model_parallel_size, 1  # as does the only rank of a pipeline
        try:
            return get_batch(data)
        finally:
            args.pipeline_model_parallel_size = size

    for name, replacement in (("get_batch_on_this_tp_rank", batch), ("is_first_or_last_pipeline_stage", hooks.needs_data)):
        if hasattr(utils, name):
            compat.wrap(compat.importers(utils, name), name, replacement)
