"""A GPT whose linears and norms are Transformer Engine's, trained under a schedule on a CPU."""

from __future__ import annotations

from argparse import Namespace
from typing import Any
from unittest.mock import patch

import tiny_gpt


def train(schedule: str, flags: str, pp: int = 2, tp: int = 1) -> Any:
    """Losses and gradient norms of three iterations, as ``tiny_gpt.train``.

    ``--transformer-impl transformer_engine`` asks for a GPU: it is set once flags are read. Attention is megatron-core's.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron.pipeline.flags import validation
    from megatron.pipeline.model import layer_spec

    validate, replacements = validation.validate, layer_spec._replacements

    def validated(args: Namespace, world: int) -> None:
        validate(args, world)
        args.transformer_impl = "transformer_engine"

    with (
        patch.object(validation, "validate", validated),
        patch.object(
            layer_spec, "_replacements", lambda config: replacements(config) | {TEDotProductAttention: DotProductAttention}
        ),
    ):
        return tiny_gpt.train(schedule, pp=pp, tp=tp, iterations=3, flags=tuple(flags.split()))
