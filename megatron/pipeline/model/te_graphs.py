"""CUDA graphs of layers under a schedule: F, B and W of every layer in every slot, captured by Transformer Engine.

Written against ``make_graphed_callables`` of transformer_engine.pytorch from 2.11 on, the first with graphs of W, and against
megatron-core's ``TECudaGraphHelper``, which asks for them in the order of its own schedules. Transformer Engine's rules do for
a W directly behind its B: a W is that of its chunk's last B, all backwards have one output gradient, and a forward has the input
of what has ended its B. So each slot (``slots_of``) is captured by a call of its own, in which each layer is a chunk of one
microbatch: it has its own input and output gradient in every slot, and W may come as late as the plan has it.

Graphs of one pool share memory as they were captured, in that order, and are right only where they are replayed in it. Within a
slot F, B and W always come in this order; slots come in any. So each slot has a pool of its own. (It is not enough to hold what
a slot keeps until the last capture: it may lie where a graph captured before has had its temporaries.)

A slot stays with its microbatch until W, so what eager parts of the model keep of its tensors is there, too. Only messages may
outlast it: the gradient of a chunk's input is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import cuda_graphs, distributed_data_parallel

from megatron.pipeline.backward import weight_tasks
from megatron.pipeline.model import local_graphs, te_linear

__all__ = ["capture", "place", "slot_order"]

GRAPHED = "transformer_engine"  # of --cuda-graph-impl
OLDEST = (2, 11)
_SLOTS, _GRAPHS = "slots", "slot_graphs"  # of a chunk: of every microbatch; of a layer: by slot


def slot_order(weights: Sequence[bool]) -> tuple[int | float, ...]:
    """``_order`` of a slot: F of its layers, then B and then W from the last to the first; n, -n and -n - 0.5 for layer n.

    Args:
        weights: whether each layer has a W.
    """
    layers = range(1, len(weights) + 1)
    backwards = [-layer for layer in reversed(layers)]
    return (*layers, *backwards, *(layer - 0.5 for layer in backwards if weights[-layer - 1]))


def place(chunks: Sequence[torch.nn.Module], slots: Sequence[Sequence[int]]) -> None:
    """Give every microbatch of the next iteration the graphs of its slot, once they are captured.

    A chunk that needs more slots than were captured runs as it is.

    Args:
        slots: of a rank's plan, by chunk and microbatch.
    """
    for wrapped, row in zip(chunks, slots, strict=True):
        chunk: torch.nn.Module = unwrap_model(wrapped)
        setattr(chunk, _SLOTS, row)
        cuda_graphs.capture_with(chunk, capture)
        layers: list[Any] = [module for module in chunk.modules() if hasattr(module, _GRAPHS)]
        for layer in layers:
            graphs: list[SlotGraph] = getattr(layer, _GRAPHS)
            if distributed_data_parallel.gathered(wrapped):  # whose hooks of modules a replay does not call
                layer.setup_manual_hooks(wrapped._make_forward_pre_hook)
            layer.cuda_graphs = [graphs[slot] for slot in row] if max(row) < len(graphs) else []
            if not layer.cuda_graphs:
                local_graphs.say_eager()


def capture(helper: Any, upstream: Any) -> None:
    """Capture all slots of the plan that runs, in place of a helper's ``create_cudagraphs``.

    Args:
        helper: ``TECudaGraphHelper``.
        upstream: its module, of which two functions are replaced meanwhile.

    Raises:
        ValueError: Transformer Engine is too old, or layers have what graphs of W do not.
    """
    if (te_linear.release() or (0, 0)) < OLDEST:
        raise ValueError(
            f"--cuda-graph-impl transformer_engine needs transformer-engine >= {'.'.join(map(str, OLDEST))}, whose graphs have "
            "W, and an older one is installed: update it, or leave the flag out"
        )
    chunks = unwrap_model(list(helper.model))
    start = helper._start_capturing()
    for index, layers in enumerate(helper.callables_per_chunk):
        row = getattr(chunks[index], _SLOTS)
        slots = [_captured(helper, upstream, index, len(set(row)), len(row)) for _ in range(1 + max(row))] if layers else []
        for number, layer in enumerate(layers):
            linears = _delayed(layer)
            setattr(layer, _GRAPHS, [SlotGraph(graphs[number], linears, number == 0) for graphs in slots])
            for linear in linears:
                linear.notifies_alone()
    helper._graphs_created = True
    helper._finish_capturing(start)
    place(helper.model, [getattr(chunk, _SLOTS) for chunk in chunks])


def _captured(helper: Any, upstream: Any, chunk: int, slots: int, microbatches: int) -> Sequence[Any]:
    """The graphed layers of a chunk in one slot."""
    own, layers = copy(helper), helper.callables_per_chunk[chunk]
    order = slot_order([bool(_delayed(layer)) for layer in layers])
    own.num_model_chunks, own.num_layers_per_chunk = len(layers), [1] * len(layers)
    own.callables_per_chunk, own.flattened_callables = [[layer] for layer in layers], layers
    own.chunks_with_decoder = [helper.chunks_with_decoder[chunk]] * len(layers)
    predicting = helper.callables_per_chunk_is_mtp[chunk]
    own.callables_per_chunk_is_mtp, own.flattened_callables_is_mtp = [[one] for one in predicting], predicting
    count, convert = upstream.get_num_microbatches, upstream.convert_schedule_table_to_order
    upstream.get_num_microbatches, upstream.convert_schedule_table_to_order = lambda: 1, lambda *_: list(order)
    try:
        inputs, options = own._get_cuda_graph_input_data()
    finally:
        upstream.get_num_microbatches, upstream.convert_schedule_table_to_order = count, convert
    runs = helper.config.cuda_graph_warmup_steps * microbatches  # upstream wants ten of each layer before its capture
    options |= {"num_warmup_iters": max(1, math.ceil((10 - runs) / slots)), "_reuse_graph_input_output_buffers": False}
    with get_cuda_rng_tracker().fork() if helper.config.sequence_parallel else nullcontext():
        return upstream.make_graphed_callables(tuple(layers), inputs, **options)  # type: ignore[no-any-return]


def _delayed(layer: Any) -> list[te_linear.Marking]:
    """The linears of a layer's graphs that leave their weight gradients to W.

    Raises:
        ValueError: some are frozen, or add biases themselves: graphs of W do not have these.
    """
    found = []
    for part in layer._get_submodules_under_cudagraphs():
        for module in part.modules():
            if isinstance(module.forward, te_linear.Marking):
                found.append(module.forward)
                if module.forward.biases or not module.forward.weights:
                    what = "adds its bias itself" if module.forward.biases else "has a frozen weight"
                    raise ValueError(
                        f"--cuda-graph-impl transformer_engine: {type(module).__name__} of layer {layer.layer_number} {what}, of "
                        "which a graph of W has no gradient: train without CUDA graphs"
                    )
    return found


class SlotGraph:
    """Graphs of a layer in a slot, to be called in its place.

    Args:
        graphs: what Transformer Engine has made.
        linears: those that leave their weight gradients to W.
        first: of the chunk's graphed layers, so that the gradient of its input is a message.
    """

    def __init__(self, graphs: Any, linears: Sequence[te_linear.Marking], first: bool) -> None:
        self._graphs, self._linears, self._first = graphs, linears, first

    def __call__(self, hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if torch.is_grad_enabled():
            if not hidden.requires_grad:
                hidden = hidden.detach().requires_grad_()
            hidden = hidden.view_as(hidden)  # see Marking
            hidden.register_hook(self._leave_weights)
        return self._graphs(hidden, *rest, **options)

    def reset(self) -> None:
        """Give up the graphs."""
        self._graphs.reset()

    def _leave_weights(self, gradient: torch.Tensor) -> torch.Tensor | None:
        task = GraphedGradient(self._graphs, self._linears)
        if weight_tasks.is_deferred():
            weight_tasks.submit(task)
        else:  # B of other layers comes before, as it was captured
            torch.autograd.Variable._execution_engine.queue_callback(task.run)
        return gradient.clone() if self._first else None


class GraphedGradient:
    """Weight gradients of a layer's graphs for one microbatch, whose B has just run. Their memory stays the slot's."""

    held: tuple[torch.Tensor, ...] = ()

    def __init__(self, graphs: Any, linears: Sequence[te_linear.Marking]) -> None:
        self._graphs, self._linears = graphs, linears
        for weight in (weight for linear in linears for weight in linear.weights):
            weight.grad = None  # a stand-in

    def prefetch(self) -> None:
        """Nothing: what it communicates is in the graph."""

    def run(self) -> None:
        """Replay W, which adds the gradients to ``main_grad``, and notify DDP.

        Raises:
            RuntimeError: DDP does not wait for them.
        """
        if self._linears:
            self._graphs.backward_dw()
        for linear in reversed(self._linears):  # as B without graphs has it
            linear.stand_in()
            for hook in linear.notify:
                hook()
