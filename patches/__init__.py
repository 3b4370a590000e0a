"""The upstream symbols that this package replaces, one file per upstream module. Nothing else touches megatron.core.

Every file names the symbols, the reason, and the versions it knows; ``upstream.require`` refuses others with a clear error.
``install()`` applies all of them; it is safe to call more than once.
"""

from __future__ import annotations


def install() -> None:
    """Apply every patch. Call it first thing in a program, before a model is built or a process group exists.

    Raises:
        RuntimeError: megatron-core is missing, or its version is not one that the patches know.
    """
    from megatron.pipeline.patches import cpu, moe_experts, moe_utils, schedules, tensor_parallel_layers

    for patch in (cpu, tensor_parallel_layers, moe_experts, moe_utils, schedules):
        patch.install()
