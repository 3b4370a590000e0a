"""CUDA graphs of megatron-core (``--cuda-graph-impl local``) under a schedule: a runner of each captured part for every slot.

Upstream's runners have F, and one backward with the weight gradients: those of captured linears stay in B, and DDP hears of them
from autograd. The first training iteration runs as it is and is recorded; at its end upstream captures what it has recorded. A
slot (``slots_of``) stays with its microbatch until W, so what eager parts of the model keep of graphs' tensors is there, too.

Graphs of one pool share memory as they were captured, in that order. Within a slot the F of its parts and their B always come in
one order; slots come in any. So each slot of a chunk has a pool of its own, and what comes from outside of graphs lies beside
the pools, also where all slots have one buffer for it, such as rotary embeddings (``patches/cuda_graphs.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import compat, cuda_graphs

__all__ = ["GRAPHED", "captured_parts", "place", "say_eager"]

logger = logging.getLogger(__name__)

GRAPHED = "local"  # of --cuda-graph-impl
_POOLS = "graph_pools"  # of a chunk, by slot
_WHOLE, _ROUTER = "cudagraph_manager", "cudagraph_manager_router"


def captured_parts(chunk: torch.nn.Module) -> set[torch.nn.Module]:
    """Modules that run within graphs: those of whole layers, and of layers with experts all of the MLP but these.

    Raises:
        ValueError: a layer with experts is to be captured whole, or megatron-core is too old.
    """
    parts = set[torch.nn.Module]()
    for layer in _layers(chunk):
        if hasattr(layer, _WHOLE):
            if getattr(layer, "is_moe_layer", False):
                raise ValueError(
                    f"--cuda-graph-impl local captures layer {layer.layer_number} whole, and the host reads how many tokens its "
                    "experts have: take transformer_engine with --cuda-graph-scope attn moe_router (from 0.18 on "
                    "--cuda-graph-modules), or a --hybrid-layer-pattern, whose E are layers of their own"
                )
            parts.update(layer.modules())
        elif hasattr(layer, _ROUTER):
            parts.update(part for name, child in layer.mlp.named_children() if name != "experts" for part in child.modules())
    if parts and not cuda_graphs.keeps_inputs():
        raise ValueError(
            f"--cuda-graph-impl local needs megatron-core 0.19, whose graphs keep an input until B, and {compat.version()} is "
            "installed: update it, or take transformer_engine"
        )
    return parts


def place(chunks: Sequence[torch.nn.Module], slots: Sequence[Sequence[int]]) -> None:
    """Give every microbatch of the next iteration the graphs of its slot, or slots to be recorded.

    A chunk that needs more slots than were captured runs as it is.

    Args:
        slots: of a rank's plan, by chunk and microbatch; none, and all layers run as they are.
    """
    for index, wrapped in enumerate(chunks):
        chunk: Any = unwrap_model(wrapped)
        chunk.config.deallocate_pipeline_outputs = False  # they are the graphs'
        pools = vars(chunk).setdefault(_POOLS, {})
        fits = [cuda_graphs.follow(manager, slots[index] if slots else (), pools) for manager in _managers(chunk)]
        if not all(fits):
            say_eager()


@cache
def say_eager() -> None:
    """Say, once, that a plan needs more slots than there are graphs of."""
    logger.warning("CUDA graphs: a plan holds more microbatches than were captured, and runs without them")


def _managers(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (part for layer in _layers(chunk) for name, part in layer.named_children() if name.startswith(_WHOLE))


def _layers(chunk: torch.nn.Module) -> Iterator[Any]:
    return (module for module in chunk.modules() if hasattr(module, "layer_number"))
