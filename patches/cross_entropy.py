"""megatron.core.tensor_parallel.cross_entropy: ``vocab_parallel_cross_entropy``, as a loop's own loss function calls it.

With label smoothing every tensor-parallel rank takes its own rows of the vocabulary for all of them: the loop warns.
"""

from __future__ import annotations

from typing import Any

from megatron.pipeline.patches import compat, loops


def install_loop() -> None:
    compat.wrap(compat.module("megatron.core.tensor_parallel.cross_entropy"), "vocab_parallel_cross_entropy", _compute)


def _compute(compute: Any, *given: Any, **options: Any) -> Any:
    smoothing = options.get("label_smoothing", given[2] if len(given) > 2 else 0.0)
    if smoothing and loops.current is not None:
        loops.current.warn(smoothed_loss=smoothing)
    return compute(*given, **options)
