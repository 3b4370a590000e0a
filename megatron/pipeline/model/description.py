"""Description of a training from its flags: the one way to what ``planner.shape`` and ``planner.costmodel`` read."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from typing import Any

from megatron.pipeline.planner import STOCK, Facts, ModelDescription, Shape, topics

_NUMBERS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}  # bytes by the names of --exp-avg-dtype and its like


def describe(args: Namespace) -> ModelDescription:
    """Describe a training.

    Args:
        args: Megatron-LM's flags after ``validate``, with ``padded_vocab_size`` where the vocabulary counts; those of kernels may
            be missing.
    """
    own = {field.name: getattr(args, field.name) for field in fields(ModelDescription) if hasattr(args, field.name)}
    return ModelDescription(
        **own
        | {
            "attention_backend": _name(own.get("attention_backend")),
            "cuda_graph_impl": own.get("cuda_graph_impl") or "none",
            "cuda_graph_scope": frozenset(str(_name(part)) for part in own.get("cuda_graph_scope") or ()),
            "is_stock": args.pipeline.schedule == STOCK,
            "spread": args.vocabulary.spread,
            "logits_limit": args.vocabulary.logits_limit,
            "recompute_fused_backward": args.pipeline.recompute_fused_backward,
            "undoes_steps": args.steps.ahead and args.steps.copy == "device",
            "at_once": any(Facts(vars(args)).found(topics.AT_ONCE)),
        }
        | {f"{name}_bytes": _bytes(args, name) for name in ("exp_avg", "exp_avg_sq", "main_params", "main_grads")}
    )


def shape_of(args: Namespace) -> Shape:
    """Shape of the model that flags describe, and of its microbatches."""
    return Shape.of(describe(args))


def _name(value: Any) -> Any:
    """Name of what may be a member of an enumeration, as it is under ``mpipe launch``."""
    return getattr(value, "name", value)


def _bytes(args: Namespace, name: str) -> int:
    """Bytes of one of the optimizer's numbers, by our flag, or by the torch type that Megatron-LM makes of its own."""
    kind: Any = getattr(args, f"{name}_dtype", None) or getattr(args, name, None)
    return int(getattr(kind, "itemsize", 0) or _NUMBERS.get(kind, _NUMBERS["fp32"]))
