"""megatron.core.tensor_parallel.layers: linears whose backward can be split.

``LinearWithGradAccumulationAndAsyncCommunication``: replaced by ``SplitLinear``, which both linears and the output layer
look up at call time. It behaves as upstream's for every weight that was not prepared for splitting.
``ColumnParallelLinear`` and ``RowParallelLinear`` gain ``register_wgrad_accumulation_and_reduce_hooks``, the method by
which megatron-core's DDP lets a module say when a delayed weight gradient is there (Transformer Engine's modules have it).
"""

from __future__ import annotations

from megatron.pipeline.patches import compat


def install() -> None:
    layers = compat.module("megatron.core.tensor_parallel.layers")
    from megatron.pipeline.backward import weight_tasks
    from megatron.pipeline.backward.linear import SplitLinear

    if layers.LinearWithGradAccumulationAndAsyncCommunication is SplitLinear:
        return
    layers.LinearWithGradAccumulationAndAsyncCommunication = SplitLinear  # type: ignore[attr-defined]
    for linear in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        linear.register_wgrad_accumulation_and_reduce_hooks = weight_tasks.register_hook
