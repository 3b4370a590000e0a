"""megatron.core.transformer.moe.experts: local grouped experts whose backward can be split.

``gg``: the module's view of the package grouped_gemm. Its ``ops.gmm`` becomes one that makes the weight gradient a task of W,
and that works without the package too. ``GroupedMLP.forward`` uses it for a microbatch without tokens as well.
``GroupedMLP`` gains ``register_wgrad_accumulation_and_reduce_hooks``, as the linears do (``tensor_parallel_layers.py``).
"""

from __future__ import annotations

from types import SimpleNamespace

from megatron.pipeline.patches import compat


def install() -> None:
    experts = compat.module("megatron.core.transformer.moe.experts")
    if not compat.has_local_grouped_experts():
        return  # since 0.17 all grouped experts are Transformer Engine's
    from megatron.pipeline.backward import grouped_experts, weight_tasks

    if hasattr(experts.GroupedMLP, "register_wgrad_accumulation_and_reduce_hooks"):
        return
    experts.gg = SimpleNamespace(  # type: ignore[attr-defined]
        ops=SimpleNamespace(gmm=grouped_experts.gmm), assert_grouped_gemm_is_available=lambda: None
    )
    experts.GroupedMLP.forward = grouped_experts.patched_forward(experts.GroupedMLP.forward)
    experts.GroupedMLP.register_wgrad_accumulation_and_reduce_hooks = weight_tasks.register_hook
