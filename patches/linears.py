"""Linears and local grouped experts whose backward can be split.

``tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication``: replaced by ``SplitLinear``, which both linears and
the output layer look up at call time. It behaves as upstream's for every weight that was not prepared for splitting.
``transformer.moe.experts.gg``, up to 0.16: the module's view of the package grouped_gemm. Its ``ops.gmm`` becomes one that makes
the weight gradient a task of W, and that works without the package too. ``GroupedMLP.forward`` uses it for a microbatch without
tokens as well.
``ColumnParallelLinear``, ``RowParallelLinear`` and ``GroupedMLP`` gain ``register_wgrad_accumulation_and_reduce_hooks``, by which
megatron-core's DDP lets a module say when a delayed weight gradient is there (Transformer Engine's modules have it).
"""

from __future__ import annotations

from types import SimpleNamespace

from megatron.pipeline.patches import compat


def install() -> None:
    layers = compat.module("megatron.core.tensor_parallel.layers")
    experts = compat.module("megatron.core.transformer.moe.experts")
    from megatron.pipeline.backward import grouped_experts, weight_tasks
    from megatron.pipeline.backward.linear import SplitLinear

    if layers.LinearWithGradAccumulationAndAsyncCommunication is SplitLinear:
        return
    layers.LinearWithGradAccumulationAndAsyncCommunication = SplitLinear  # type: ignore[attr-defined]
    modules = [layers.ColumnParallelLinear, layers.RowParallelLinear]
    if compat.has_local_grouped_experts():  # since 0.17 all grouped experts are Transformer Engine's
        experts.gg = SimpleNamespace(  # type: ignore[attr-defined]
            ops=SimpleNamespace(gmm=grouped_experts.gmm), assert_grouped_gemm_is_available=lambda: None
        )
        experts.GroupedMLP.forward = grouped_experts.patched_forward(experts.GroupedMLP.forward)
        modules.append(experts.GroupedMLP)
    for module in modules:
        module.register_wgrad_accumulation_and_reduce_hooks = weight_tasks.register_hook
