"""The passes of a rank's stages, and what each leaves to the next: F its graph to B, B its weight gradients to W."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from megatron.pipeline.backward.weight_tasks import WeightTask, deferring
from megatron.pipeline.record.memory import hold
from megatron.pipeline.runtime.executor import Handlers
from megatron.pipeline.runtime.offload.offloading import InFlight
from megatron.pipeline.runtime.p2p import Tensors
from megatron.pipeline.schedule.core.passes import COPY_KINDS, Kind, Pass
from megatron.pipeline.schedule.lower.program import Compute, Program


class Stages(Protocol):
    """What the stages of a rank compute."""

    def forward(self, work: Pass, inputs: Tensors, keep_graph: bool) -> Tensors:
        """Run a forward. Inputs are [None] on the first stage; outputs are the loss on the last.

        Without its graph it keeps nothing for a backward: ``recompute`` will come.
        """

    def recompute(self, work: Pass, inputs: Tensors) -> Tensors:
        """Run a forward again, on the same inputs, data and random numbers, and keep its graph. Its outputs have been sent by F:
        they are released."""

    def backward(self, work: Pass, inputs: Tensors, outputs: Tensors, gradients: Tensors) -> Tensors:
        """Run a backward from the outputs' gradients ([None] on the last stage) to the inputs'."""

    def braid(
        self, work: Pass, inputs: Tensors, keep_graph: bool, other: Pass, kept: Tensors, outputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Run a forward and the backward of another microbatch or chunk as one: with the arguments of ``forward`` and then of
        ``backward``, and the results of both."""

    def release(self, outputs: Tensors) -> None:
        """The outputs have been sent: their data is not needed any more, only their graph."""


class StagePasses:
    """Runs F, R, B, BW and W. One iteration owns it.

    Args:
        stages: compute the passes.
        program: this rank's.
        keep_graphs: False for programs without backwards, whose inputs and outputs are dropped at once.
        offloaded: moves what the program copies to host memory and back; None for programs without copies.
    """

    def __init__(self, stages: Stages, program: Program, keep_graphs: bool = True, offloaded: InFlight | None = None) -> None:
        self._stages = stages
        self._keep_graphs = keep_graphs
        self._offloaded = offloaded
        computed = (operation.work for operation in program if isinstance(operation, Compute))
        self._recomputed = {work[1:3] for work in computed if work.kind is Kind.R}
        # By microbatch and chunk: what came from each rank, the inputs, and the outputs.
        self._graphs: dict[tuple[int, int], tuple[Mapping[int, Tensors], Tensors, Tensors]] = {}
        self._weights: dict[tuple[int, int], list[tuple[WeightTask, list[Any]]]] = {}

    @property
    def handlers(self) -> Handlers:
        """For the executor."""
        backward = dict.fromkeys((Kind.B, Kind.BW), self.backward)
        passes = {Kind.F: self.forward, Kind.R: self.recompute, **backward, Kind.W: self.weight}
        handlers = Handlers(passes, release=self._stages.release, abandon=(self._graphs.clear,))
        if self._offloaded is None:
            return handlers
        return handlers.joined(Handlers({}, dict.fromkeys(COPY_KINDS, self._offloaded), abandon=(self._offloaded.abandon,)))

    def forward(self, work: Pass, received: Mapping[int, Tensors], peers: tuple[int, ...]) -> Mapping[int, Tensors]:
        """F: the same outputs for every peer."""
        key, inputs = work[1:3], [tensor for tensors in received.values() for tensor in tensors] or [None]
        keep_graph = key not in self._recomputed
        with self._capturing(work, keep_graph):
            outputs = self._stages.forward(work, inputs, keep_graph)
        if self._offloaded:
            self._offloaded.adopt(work, inputs)
        if self._keep_graphs:
            self._graphs[key] = received, inputs, outputs if keep_graph else []
        return dict.fromkeys(peers, outputs)

    def recompute(self, work: Pass, _received: Mapping[int, Tensors], _peers: tuple[int, ...]) -> Mapping[int, Tensors]:
        """R."""
        received, inputs, _ = self._graphs[work[1:3]]
        self._graphs[work[1:3]] = received, inputs, self._stages.recompute(work, inputs)
        return {}

    def backward(self, work: Pass, received: Mapping[int, Tensors], peers: tuple[int, ...]) -> Mapping[int, Tensors]:
        """B, which leaves weight gradients to W, and BW: to each peer the gradient by what came from it."""
        sources, inputs, outputs = self._graphs.pop(work[1:3])
        gradients = _sum(received.values())
        tasks: list[WeightTask] = []
        with deferring(tasks) if work.kind is Kind.B else nullcontext():
            input_gradients = self._stages.backward(work, inputs, outputs, gradients)
        if work.kind is Kind.B:
            self._weights[work[1:3]] = [(task, hold(task.held)) for task in tasks]
        rest = iter(input_gradients)
        by_peer = {peer: [next(rest) for _ in tensors] for peer, tensors in sources.items()}
        return {peer: by_peer[peer] for peer in peers}

    def weight(self, work: Pass, _received: Mapping[int, Tensors], _peers: tuple[int, ...]) -> Mapping[int, Tensors]:
        """W."""
        _run(self._weights.pop(work[1:3]))
        return {}

    def _capturing(self, work: Pass, keep_graph: bool) -> AbstractContextManager[None]:
        return self._offloaded.capturing(work, keep_graph) if self._offloaded else nullcontext()


def _sum(gradients: Iterable[Tensors]) -> Tensors:
    """The gradient by an output that several stages have taken; [None] where none has."""
    whole, *others = [*gradients] or [[None]]
    for other in others:
        whole = [one if more is None else more if one is None else one + more for one, more in zip(whole, other, strict=True)]
    return whole


@torch.no_grad()  # as in the backward that the tasks are a part of
def _run(tasks: Iterable[tuple[WeightTask, list[Any]]]) -> None:
    """Run weight tasks in order, each one's communication started while the one before computes."""
    waiting = list(tasks)
    for task, _ in waiting[:1]:
        task.prefetch()
    while waiting:
        task, held = waiting.pop(0)
        for following, _ in waiting[:1]:
            following.prefetch()
        task.run()
        del task, held
