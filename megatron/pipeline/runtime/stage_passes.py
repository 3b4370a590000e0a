"""The passes of a rank's stages, and what each leaves to the next: F its graph to B, B its weight gradients to W."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch

from megatron.pipeline.backward.weight_tasks import WeightTask, deferring
from megatron.pipeline.monitor.memory import hold, is_observed
from megatron.pipeline.planner import Kind, Pass, kinds, ops
from megatron.pipeline.runtime.executor import Handlers
from megatron.pipeline.runtime.model_stages import ModelStages
from megatron.pipeline.runtime.offload.offloading import InFlight
from megatron.pipeline.runtime.p2p import Tensors


class StagePasses:
    """Runs F, R, B, BW and W, and braids of F with B or BW. One iteration owns it.

    Args:
        stages: compute the passes.
        program: this rank's.
        keep_graphs: False for programs without backwards, whose inputs and outputs are dropped at once.
        offloaded: moves what the program copies to host memory and back; None for programs without copies.
        shielded: the chunks whose B has work behind its collectives: see ``Schedule.shielded``.
        frozen: those whose B has nothing to do: see ``Schedule.frozen``.
        ends: those whose inputs need no gradient, the frozen ones among them.
    """

    def __init__(
        self,
        stages: ModelStages,
        program: ops.Program,
        keep_graphs: bool = True,
        offloaded: InFlight | None = None,
        shielded: Set[int] = frozenset(),
        frozen: Set[int] = frozenset(),
        ends: Set[int] = frozenset(),
    ) -> None:
        self._stages = stages
        self._shielded, self._frozen, self._ends = shielded, frozen, ends
        self._keep_graphs = keep_graphs
        self._offloaded = offloaded
        computed = (operation.work for operation in program if isinstance(operation, ops.Compute))
        self._recomputed = {work[1:3] for work in computed if work.kind is Kind.R}
        self._graphs: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}  # inputs and outputs, by microbatch and chunk
        self._weights: dict[tuple[int, int], list[tuple[WeightTask, list[Any]]]] = {}

    @property
    def handlers(self) -> Handlers:
        backward = dict.fromkeys((kind for kind in Kind if kind.sends_gradient), self.backward)
        passes = {Kind.F: self.forward, Kind.R: self.recompute, **backward, Kind.W: self.weight}
        handlers = Handlers(passes, release=self._stages.release, abandon=(self._graphs.clear,), braid=self.braid)
        if self._offloaded is None:
            return handlers
        return handlers.joined(Handlers({}, dict.fromkeys(kinds.COPY_KINDS, self._offloaded), abandon=(self._offloaded.abandon,)))

    def forward(self, work: Pass, received: Tensors) -> Tensors:
        inputs, keep_graph = received or [None], self._keeps_graph(work)
        for tensor in received if work.chunk in self._ends else ():
            if tensor is not None:
                tensor.requires_grad_(False)
        with self._offloaded.capturing(work, keep_graph) if self._offloaded else nullcontext():
            outputs = self._stages.forward(work, inputs, keep_graph)
        if work.chunk in self._frozen and not work.microbatch:
            _check_nothing_trains(outputs)
        return self._keep(work, inputs, outputs)

    def recompute(self, work: Pass, _: Tensors) -> Tensors:
        inputs, _ = self._graphs[work[1:3]]
        self._graphs[work[1:3]] = inputs, self._stages.recompute(work, inputs)
        return []

    def backward(self, work: Pass, gradients: Tensors) -> Tensors:
        """B, which leaves weight gradients to W, and BW: the gradients by the inputs."""
        inputs, outputs = self._graphs.pop(work[1:3])
        with self._leaving_weights(work):
            if work.chunk in self._frozen:
                return []
            return self._stages.backward(work, inputs, outputs, gradients or [None])

    def braid(self, work: Pass, received: Tensors, other: Pass, gradients: Tensors, made: Callable[[Tensors], None]) -> Tensors:
        """F and the backward of another microbatch or chunk as one unit: ``made`` takes what ``forward`` returns, and the caller
        what ``backward`` returns. One runs after the other where the stages have no braids, or F keeps no graph."""
        braid = self._stages.braid
        if braid is None or not self._keeps_graph(work):
            made(self.forward(work, received))
            return self.backward(other, gradients)
        inputs = received or [None]
        kept, outputs = self._graphs.pop(other[1:3])
        with self._leaving_weights(other):
            return braid(
                work, inputs, other, kept, outputs, gradients or [None], lambda outputs: made(self._keep(work, inputs, outputs))
            )

    def weight(self, work: Pass, _: Tensors) -> Tensors:
        run_weights(self._weights.pop(work[1:3]))
        return []

    def _keeps_graph(self, work: Pass) -> bool:
        return work[1:3] not in self._recomputed

    def _keep(self, work: Pass, inputs: Tensors, outputs: Tensors) -> Tensors:
        """Keep what the backward of a forward needs; the outputs."""
        if self._offloaded:
            self._offloaded.adopt(work, inputs)
        if work.chunk in self._ends:
            inputs = [None]
        if self._keep_graphs:
            self._graphs[work[1:3]] = inputs, outputs if self._keeps_graph(work) and work.chunk not in self._frozen else []
        return outputs

    @contextmanager
    def _leaving_weights(self, work: Pass) -> Iterator[None]:
        """A backward that does not finish the weights' gradients leaves them to W."""
        if work.kind.finishes_weights:
            yield
            return
        tasks: list[WeightTask] = []
        with deferring(tasks, work.chunk in self._shielded):
            yield
        held: Iterable[list[Any]] = (hold(task.held) for task in tasks) if is_observed() else repeat([])
        self._weights[work[1:3]] = list(zip(tasks, held, strict=False))


def _check_nothing_trains(outputs: Tensors) -> None:
    """Refuse outputs of a frozen chunk behind a weight that trains.

    Raises:
        ValueError: says which; what needs a gradient and is no parameter, as of the hooks of adapters' frameworks, may be there.
    """
    found, seen = [tensor.grad_fn for tensor in outputs if tensor is not None], set[Any]()
    while found:
        if (node := found.pop()) is None or node in seen:
            continue
        seen.add(node)
        if isinstance(weight := getattr(node, "variable", None), torch.nn.Parameter):
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} trains outside the model's chunks, and feeds a stage whose own weights "
                "are all frozen, to which no gradient goes back: make it a parameter of a module in that chunk, or freeze it"
            )
        found.extend(following for following, _ in node.next_functions)


def run_weights(tasks: list[tuple[WeightTask, list[Any]]]) -> None:
    """Run weight tasks in order and empty the list, each one's communication started while the one before computes. A task, and
    what is beside it, is let go of once it has run."""
    with torch.no_grad():  # as in the backward that the tasks are a part of
        if tasks:
            tasks[0][0].prefetch()
        while tasks:
            task, held = tasks.pop(0)
            if tasks:
                tasks[0][0].prefetch()
            task.run()
            del task, held
