"""A GPT whose linears and norms are Transformer Engine's, trained under a schedule on a CPU."""

from __future__ import annotations

from argparse import Namespace
from unittest.mock import patch

import tiny_gpt

from megatron.pipeline.schedule.core.names import STOCK


def train(schedule: str, flags: str, tp: int = 1) -> list[tiny_gpt.Step]:
    """Losses and gradient norms of three iterations on two pipeline ranks. Linears add their products to ``main_grad``.

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
        run = tiny_gpt.Run(schedule, pp=2, tp=tp, flags=tuple(flags.split()), measure=schedule != STOCK)
    linears = [module for chunk in run.chunks for module in chunk.modules() if te_linear.is_engines(module)]
    assert linears
    for linear in linears:  # as a schedule that splits them does; under megatron-core's own it takes apex
        linear.fuse_wgrad_accumulation = True  # type: ignore[assignment]
    return [run.step(iteration) for iteration in range(3)]
