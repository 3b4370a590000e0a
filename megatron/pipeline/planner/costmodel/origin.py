"""Origin of measured costs: what the ``costs.json`` of a rehearsal says beside its numbers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.reading import parse_json

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "num_experts")
_RANKS = ("tensor_model_parallel_size", "expert_model_parallel_size", "micro_batch_size")


class Rehearsed(NamedTuple):
    """Entries of a costs file.

    Attributes:
        of: as ``described`` wrote it; empty in a file of other origin.
    """

    costs: Costs
    of: Mapping[str, Any]


def described(args: Namespace, collectives: str) -> dict[str, Any]:
    """Describe the training that costs are of, for ``read``.

    Args:
        collectives: of tensor, context and expert parallelism: ``run`` or ``priced``, where there are any.
    """
    quantized = [f"{kind} {getattr(args, f'{kind}_recipe')}" for kind in ("fp8", "fp4") if getattr(args, kind, None)]
    numbers = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    return {name: getattr(args, name) for name in (*_SIZES, *_RANKS)} | {
        "numbers": " ".join([numbers, *quantized]),
        "collectives": collectives if _shares_layers(args) else "none",
    }


def _shares_layers(args: Namespace) -> bool:
    """Tell whether several ranks share a layer, and so exchange data within passes."""
    sizes = args.tensor_model_parallel_size, args.context_parallel_size, args.expert_model_parallel_size
    return max(sizes) > 1


def quantized(of: Mapping[str, Any]) -> list[str]:
    """``fp8`` or ``fp4`` and its recipe, of what ``described`` wrote; empty without them."""
    return str(of.get("numbers", "")).split()[1:]


def read(text: str) -> Rehearsed:
    """Costs, and of which training they are.

    Raises:
        ValueError: as ``Costs.from_json``; or ``of`` is no object.
    """
    costs, of = Costs.from_json(text), parse_json(text, "costs").get("of", {})
    if not isinstance(of, dict):
        raise ValueError(f"of: expected the sizes of a training by name, got {of!r}")
    return Rehearsed(costs, of)


def check(of: Mapping[str, Any], model: Namespace, tensor: int, expert: int, samples: int) -> None:
    """That a file is of this model, and has the time of its computation alone: links add what ranks of a layer exchange.

    Raises:
        ValueError: it is of another; or collectives took time.
    """
    wanted = {name: getattr(model, name) for name in _SIZES} | dict(zip(_RANKS, (tensor, expert, samples), strict=True))
    other = [
        f"--{name.replace('_', '-')} {of[name]}, not {value}" for name, value in wanted.items() if of.get(name, value) != value
    ]
    if other:
        raise ValueError(f"the file is of {', '.join(other)}: give the flags of its training, or the file of this one")
    if of.get("collectives") in ("run", "priced"):
        raise ValueError(
            "its seconds contain what ranks of a layer exchange, which mpipe tune adds by the links: rehearse with "
            "--tensor-model-parallel-size, --context-parallel-size and --expert-model-parallel-size of 1"
        )
