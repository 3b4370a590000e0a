"""CUDA graphs of a chunk's layers in a slot: one each for F, B and W of every layer, captured by Transformer Engine.

Written against ``make_graphed_callables`` of transformer_engine.pytorch from 2.11 on, the first with graphs of W. Its own rules
do for a W directly behind its B: a W is that of its chunk's last B, all backwards have one output gradient, and a forward the
input of what has ended its B. So a slot is captured by a call of its own, in which each layer is a chunk of one microbatch: every
layer in every slot has its own input and output gradient, and W may come as late as the plan has it.

Graphs of one pool share memory as they were captured, in that order, and are right only where they are replayed in it. Within a
slot F, B and W always come in this order; slots come in any. So each slot has a pool of its own. (It is not enough to hold what
a slot keeps until the last capture: it may lie where a graph captured before has had its temporaries.)
"""

from __future__ import annotations

__all__ = ["slot_order"]


def slot_order(layers: int) -> tuple[int | float, ...]:
    """``_order`` of a slot: F of its layers, then B and then W from the last to the first; n, -n and -n - 0.5 for layer n."""
    backwards = range(layers, 0, -1)
    return (*range(1, layers + 1), *(-layer for layer in backwards), *(-layer - 0.5 for layer in backwards))
