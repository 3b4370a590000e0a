"""A GPT whose linears and norms are Transformer Engine's, trained under a schedule on a CPU."""

from __future__ import annotations

from argparse import Namespace
from typing import Any
from unittest.mock import patch

import tiny_gpt

from megatron.pipeline.schedule.core.names import STOCK


def train(schedule: str, flags: str, tp: int = 1, pp: int = 2) -> list[tiny_gpt.Step]:
    """Losses and gradient norms of three iterations. Linears add their products to ``main_grad``.

    ``--transformer-impl transformer_engine`` asks for a GPU: it is set once flags are read. Attention is megatron-core's.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron.pipeline.flags import validation
    from megatron.pipeline.model import layer_spec, te_linear

    validate, replacements = validation.validate, layer_spec._replacements

    def validated(args: Namespace, world: int) -> None:
        validate(args, world)
        args.transformer_impl = "transformer_engine"

    def replaced(config: object) -> dict[type, type]:
        return replacements(config) | {TEDotProductAttention: DotProductAttention}  # type: ignore[arg-type]

    with patch.object(validation, "validate", validated), patch.object(layer_spec, "_replacements", replaced):
        # Measured, activations are counted, and hooks hide weights up to 2.14: DDP then fails under megatron-core's own schedule.
        run = tiny_gpt.Run(schedule, pp=pp, tp=tp, flags=tuple(flags.split()), measure=schedule != STOCK)
    linears = [module for chunk in run.chunks for module in chunk.modules() if te_linear.is_engines(module)]
    assert linears
    for linear in linears:  # as a schedule that splits them does; under megatron-core's own it takes apex
        linear.fuse_wgrad_accumulation = True  # type: ignore[assignment]
    return [run.step(iteration) for iteration in range(3)]


def bytes_kept_by_w(tp: int) -> set[int]:
    """What waits for each W of four layers, each memory once."""
    from megatron.pipeline.model.te_linear import DelayedGradient
    from megatron.pipeline.runtime import stage_passes

    found, run_weights = set[int](), stage_passes.run_weights

    def noted(tasks: list[Any]) -> None:
        held = [tensor.untyped_storage() for task, _ in tasks if isinstance(task, DelayedGradient) for tensor in task.held]
        found.add(sum({storage.data_ptr(): storage.nbytes() for storage in held}.values()))
        run_weights(tasks)

    with patch.object(stage_passes, "run_weights", noted):
        train("zb-h1", f"--bf16 {'--sequence-parallel' if tp > 1 else ''}", tp, pp=1)
    return found
