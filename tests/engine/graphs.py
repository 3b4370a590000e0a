"""A pipeline of Transformer Engine's layers in one process, graphed by Transformer Engine in our order, or not at all.

The passes of all ranks run one after another, each when it can. Dropout draws from one generator, in that order.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from gpu_model import graphs

from megatron.pipeline.planner import Request
from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.lower.program import Compute
from megatron.pipeline.planner.schedule.lower.slots import Slots, slots_of
from megatron.pipeline.planner.schedule.time.replay import dependency_order

HIDDEN, INNER, TOKENS = 32, 48, 16
MUTATIONS = ("free at B", "one pool", "one X", "a slot fewer", "entries exchanged", "hooks left out")


class Layer(torch.nn.Module):
    """A norm and a linear, dropout, a linear, and what it was given."""

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options: dict[str, Any] = {"bias": False, "device": "cpu", "delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}
        self.first = te.LayerNormLinear(HIDDEN, INNER, **options)
        self.second = te.Linear(INNER, HIDDEN, **options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.dropout(torch.tanh(self.first(hidden)), 0.1)
        result: torch.Tensor = hidden + self.second(inner)
        return result


class Rank:
    """The layers of a rank's chunks, and how they run: as they are, or replayed."""

    def __init__(self, planned: Planned, rank: int, layers: list[list[Layer]]) -> None:
        self.layers, self._planned, self._rank = layers, planned, rank
        self.notified: list[int] = []
        for number, module in enumerate(self.modules):
            module.weight.main_grad = torch.zeros_like(module.weight, dtype=torch.float32)
            module.register_wgrad_accumulation_and_reduce_hooks(lambda number=number: self.notified.append(number))
        self._graphs: dict[tuple[int, int], list[Any]] = {}

    @property
    def modules(self) -> list[Any]:
        return [module for chunk in self.layers for layer in chunk for module in (layer.first, layer.second)]

    def forward(self, work: Pass, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self._callables(work):
            hidden = layer(hidden)
        return hidden

    def weights(self, work: Pass) -> None:
        """Run W, and of a layer's two linears the last first."""
        with torch.no_grad():
            for layer in reversed(self._callables(work)):
                if isinstance(layer, Layer):
                    layer.second.backward_dw()
                    layer.first.backward_dw()
                else:
                    layer.backward_dw()

    def _callables(self, work: Pass) -> list[Any]:
        return self._graphs.get((work.chunk, work.microbatch)) or self.layers[work.chunk]

    def capture(self, mutation: str | None) -> None:
        """Have Transformer Engine capture every slot, each in a pool of its own."""
        slots = _slots(self._planned, self._rank, mutation)
        shared = graphs.Pool() if mutation == "one pool" else None
        for chunk, row in enumerate(slots):
            x = [torch.zeros(TOKENS, HIDDEN).requires_grad_() for _ in self.layers[chunk]]
            by_slot = {
                slot: _captured(self.layers[chunk], shared or graphs.Pool(), x if mutation == "one X" else None, mutation)
                for slot in sorted(set(row))
            }
            self._graphs |= {(chunk, microbatch): by_slot[slot] for microbatch, slot in enumerate(row)}
        if mutation == "hooks left out":
            for module in self.modules:
                module.wgrad_accumulation_and_reduce_hooks.clear()
        for module in self.modules:
            module.weight.main_grad.zero_()
            module.weight.grad = None
        self.notified.clear()


def _captured(layers: list[Layer], pool: graphs.Pool, inputs: list[torch.Tensor] | None, mutation: str | None) -> Any:
    from transformer_engine.pytorch import make_graphed_callables

    from megatron.pipeline.model.te_graphs import slot_order

    order = list(slot_order([True] * len(layers)))
    if mutation == "entries exchanged" and len(layers) > 1:  # B of the last layer and of the one before
        order[len(layers)], order[len(layers) + 1] = order[len(layers) + 1], order[len(layers)]
    return make_graphed_callables(
        tuple(layers),
        tuple((one,) for one in inputs or [torch.zeros(TOKENS, HIDDEN).requires_grad_() for _ in layers]),
        num_warmup_iters=1,
        allow_unused_input=True,
        pool=pool,
        _order=order,
        _num_layers_per_chunk=[1] * len(layers),
    )


def _slots(planned: Planned, rank: int, mutation: str | None) -> Slots:
    program, slots = planned.programs[rank], planned.slots()[rank]
    if mutation == "free at B":
        until_b = tuple(one for one in program if not (isinstance(one, Compute) and one.work.kind is Kind.W))
        return slots_of(until_b, planned.schedule.placement.stages[rank])
    if mutation == "a slot fewer":
        return tuple(tuple(min(slot, max(max(row) - 1, 0)) for slot in row) for row in slots)
    return slots


def pose() -> None:
    """Have Transformer Engine capture on this CPU."""
    from transformer_engine.pytorch import graph

    view: Any = sys.modules["transformer_engine.pytorch.graph"].torch  # type: ignore[attr-defined]
    vars(view.cuda).update(
        CUDAGraph=graphs.CUDAGraph, graph=graphs.graph, is_current_stream_capturing=graphs.is_current_stream_capturing
    )
    graph._graph_pool_handle = graphs.graph_pool_handle


def train(
    name: str, microbatches: int = 8, graphed: bool = True, mutation: str | None = None, iterations: int = 5
) -> tuple[list[str], list[int]]:
    """Digests of gradients and losses of every iteration; how often weights were ready, by rank."""
    pose()
    planned = Request(name, ranks=4, microbatches=microbatches).plan()
    placement = planned.schedule.placement
    torch.manual_seed(1)
    stages = [[Layer() for _ in range(1 + stage % 2)] for stage in range(placement.depth)]
    ranks = [Rank(planned, rank, [stages[stage] for stage in row]) for rank, row in enumerate(placement.stages)]
    if graphed:
        for rank in ranks:
            rank.capture(mutation)
    digests = []
    torch.manual_seed(2)
    for _ in range(iterations):
        losses = _iteration(planned, ranks)
        digests.append(_step(stages, losses))
    return digests, [len(rank.notified) for rank in ranks]


def _iteration(planned: Planned, ranks: list[Rank]) -> list[torch.Tensor]:
    """Run every pass; messages are copies."""
    schedule, placement = planned.schedule, planned.schedule.placement
    data = torch.randn(schedule.microbatches, TOKENS, HIDDEN)
    inputs: dict[tuple[int, int], torch.Tensor] = {}
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    gradients: dict[tuple[int, int], torch.Tensor] = {}
    losses = []
    for rank, work in ((rank, schedule.passes[rank][slot]) for rank, run in dependency_order(schedule) for slot in run):
        here = placement.stage(rank, work.chunk), work.microbatch
        before, after = (here[0] - 1, here[1]), (here[0] + 1, here[1])
        if work.kind is Kind.F:
            given = data[work.microbatch] if placement.is_first(here[0]) else outputs[before].detach()
            inputs[here] = given.clone().requires_grad_()
            outputs[here] = ranks[rank].forward(work, inputs[here])
            if placement.is_last(here[0]):
                losses.append(outputs[here].detach().square().sum())
                gradients[here] = 2 * outputs[here].detach()
        if work.kind in (Kind.B, Kind.BW):
            gradient = gradients.pop(here) if placement.is_last(here[0]) else gradients.pop(after)
            torch.autograd.backward([outputs.pop(here)], [gradient.clone()])
            gradients[here] = _taken(inputs.pop(here))
        if work.kind in (Kind.W, Kind.BW):
            ranks[rank].weights(work)
    return losses


def _taken(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad.clone()


def _step(stages: list[list[Layer]], losses: list[torch.Tensor]) -> str:
    """Step of plain descent; returns a digest of the gradients and the losses."""
    digest = hashlib.sha256(torch.stack(losses).numpy().tobytes())
    with torch.no_grad():
        for layer in (layer for stage in stages for layer in stage):
            for weight in (layer.first.weight, layer.second.weight):
                digest.update(weight.main_grad.numpy().tobytes())
                weight.sub_(0.001 * weight.main_grad)
                weight.main_grad.zero_()
                weight.grad = None
            for weight in (layer.first.layer_norm_weight, layer.first.layer_norm_bias):
                digest.update(weight.grad.numpy().tobytes())
                weight.sub_(0.001 * weight.grad)
                weight.grad = None
    return digest.hexdigest()


def captured_by_microbatch(order: list[float]) -> str:
    """The error of Transformer Engine's own use of an order of one layer, whose microbatches are captured each; "" for none."""
    from transformer_engine.pytorch import make_graphed_callables

    pose()
    layer = Layer()
    for weight in (layer.first.weight, layer.second.weight):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    inputs = tuple((torch.zeros(TOKENS, HIDDEN).requires_grad_(),) for step in order if step > 0)
    options: dict[str, Any] = {"num_warmup_iters": 1, "allow_unused_input": True, "_num_layers_per_chunk": [1]}
    try:
        make_graphed_callables((layer,), inputs, _order=order, **options)
    except AssertionError as error:
        return str(error)
    return ""


def what_a_capture_refuses() -> list[str]:
    """The errors of hosts that read a result within a capture, of a message, and of a graph that is captured again."""
    found = []
    ones, other = torch.ones(2), 1 - torch.distributed.get_rank()
    uses: list[Any] = [
        lambda: ones.sum().item(),
        lambda: ones[ones > 0],
        lambda: torch.distributed.isend(ones, other),
        lambda: torch.distributed.irecv(ones, other),
        lambda: torch.distributed.all_reduce(ones),  # a graph can have it
        lambda: None,
    ]
    made = [graphs.CUDAGraph() for _ in uses[1:]]
    for one, use in zip([*made, made[-1]], uses, strict=True):
        try:
            with graphs.graph(one, graphs.Pool()):
                use()
        except AssertionError as error:
            found.append(str(error))
    return found
