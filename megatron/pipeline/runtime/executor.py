"""Interprets one rank's program for one iteration. Knows passes and messages, not families, losses or process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from megatron.pipeline.backward.weight_tasks import WeightTask, deferring
from megatron.pipeline.record.recorder import Recorder, Unmeasured
from megatron.pipeline.runtime.offload.offloading import InFlight
from megatron.pipeline.runtime.p2p import Links, Tensors
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.lower.posting import starts_posted
from megatron.pipeline.schedule.lower.program import (
    Collective,
    Compute,
    Copy,
    Flow,
    Join,
    Message,
    Operation,
    Program,
    Receive,
    Send,
    Validate,
    Wait,
)


class Stages(Protocol):
    """What the passes of this rank's stages compute."""

    def forward(self, work: Pass, inputs: Tensors, keep_graph: bool) -> Tensors:
        """Run a forward. Inputs are [None] on the first stage; outputs are the loss on the last.

        Without its graph it keeps nothing for a backward: ``recompute`` will come.
        """

    def recompute(self, work: Pass, inputs: Tensors) -> Tensors:
        """Run a forward again, on the same inputs, data and random numbers, and keep its graph."""

    def backward(self, work: Pass, inputs: Tensors, outputs: Tensors, gradients: Tensors) -> Tensors:
        """Run a backward from the outputs' gradients ([None] on the last stage) to the inputs'."""

    def release(self, outputs: Tensors) -> None:
        """The outputs have been sent: their data is not needed any more, only their graph."""

    def run_shard(self, work: Pass) -> None:
        """Run a pass of the vocabulary."""

    def join(self, collective: Collective) -> None:
        """Start this rank's part in a collective of the vocabulary."""

    def wait(self, collective: Collective) -> None:
        """Go on once a collective that was joined is over."""

    def abandon(self) -> None:
        """Let go of what is held for a vocabulary, once the collectives that were joined are over."""


class Executor:
    """One iteration of one rank, in two parts; what it holds is what is in flight, and all of it is gone in the end.

    ``begin`` runs what may come before the optimizer step of the iteration before is known to stand. Then either ``finish``
    runs the rest, or ``abandon`` leaves nothing of the iteration behind.

    Args:
        program: this rank's.
        placement, rank: where its chunks stand in the model.
        stages: computes the passes.
        links: carries the messages.
        recorder: measures the passes, or does not.
        around: a context for every pass, such as the one that lets DDP reduce gradients.
        keep_graphs: False for programs without backwards, whose inputs and outputs are dropped at once.
        offloaded: moves what the program copies to host memory and back; not needed by programs without copies.
    """

    def __init__(
        self,
        program: Program,
        placement: Placement,
        rank: int,
        stages: Stages,
        links: Links,
        recorder: Recorder | Unmeasured,
        around: Callable[[Pass], AbstractContextManager[None]],
        keep_graphs: bool = True,
        offloaded: InFlight | None = None,
    ) -> None:
        self.program = program
        self._placement = placement
        self._last_stage = placement.last_stage
        self._rank = rank
        self._stages = stages
        self.links = links
        self._recorder = recorder
        self._around = around
        self._keep_graphs = keep_graphs
        self._offloaded = offloaded or InFlight.of_nothing()
        self._operations = iter(program)
        self._posted: dict[Message, None] = {}  # receives that have not been waited for, in their order
        self._received: dict[Message, Tensors] = {}
        self._made: dict[Message, Tensors] = {}
        self._graphs: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}
        self._weights: dict[tuple[int, int], list[tuple[WeightTask, list[Any]]]] = {}
        self._recomputed = {
            (one.work.microbatch, one.work.chunk) for one in program if isinstance(one, Compute) and one.work.kind is Kind.R
        }
        self.position: Operation | None = None  # what this rank is doing, for whoever reports a hang
        self.begun = 0  # operations, so that two that look alike can be told apart

    def begin(self) -> None:
        """Run the program up to its validation; one without, to the end."""
        self._go_on()

    def finish(self) -> None:
        """Run what follows the validation."""
        self._go_on()
        self.links.start()
        for sending in self.links.unsent():
            self._at(sending)
            with self._recorder.wait(sending.message):
                self.links.finish(sending.message)
        self.position = None

    def copies(self) -> Iterable[tuple[Pass, Any, Any]]:
        """The copies to host memory and back of an iteration that has ended, with the marks of their start and end."""
        return self._offloaded.copies()

    def abandon(self) -> None:
        """Let go of what has begun. All ranks of the pipeline do so: what one has sent another has posted a receive for."""
        for message in self._posted:
            self._at(Wait(message))
            self.links.wait(message)
        for sending in self.links.unsent():
            self._at(sending)
            self.links.finish(sending.message)
        self._stages.abandon()
        self._offloaded.abandon()
        self._posted.clear()
        self._received.clear()
        self._made.clear()
        self._graphs.clear()
        self.position = None

    def _go_on(self) -> None:
        for operation in self._operations:
            self._at(operation)
            if starts_posted(operation):
                self.links.start()
            match operation:
                case Receive(message, peer):
                    self.links.receive(message, peer)
                    self._posted[message] = None
                case Join(collective):
                    self._stages.join(collective)
                case Wait(Collective() as collective):
                    with self._recorder.wait(collective):
                        self._stages.wait(collective)
                case Copy(work):
                    self._start_copy(work)
                case Wait(Pass() as work):
                    self._finish_copy(work)
                case Wait(Message() as message):
                    with self._recorder.wait(message):
                        self._received[message] = self.links.wait(message)
                    del self._posted[message]
                case Send(message, peer):
                    self._send(message, peer)
                case Compute(work):
                    with self._around(work), self._recorder.measure(work):
                        self._compute(work)
                    self.links.sweep()
                case Validate():
                    return

    def _start_copy(self, work: Pass) -> None:
        self._offloaded.start(work)
        if work.kind is Kind.H2D:
            self._recorder.reach(work)

    def _finish_copy(self, work: Pass) -> None:
        with self._recorder.wait(work):
            self._offloaded.finish(work)
        if work.kind is Kind.D2H:
            self._recorder.reach(work)

    def _at(self, operation: Operation) -> None:
        self.position = operation
        self.begun += 1

    def _compute(self, work: Pass) -> None:
        key = work.microbatch, work.chunk
        stage = self._placement.stage(self._rank, work.chunk)
        match work.kind:
            case Kind.F:
                inputs: Tensors = [None]
                if stage > 0:
                    inputs = self._take(Message(Flow.ACTIVATION, work.microbatch, stage - 1))
                recomputed = key in self._recomputed
                with self._offloaded.capturing(work, keeps_graph=not recomputed):
                    outputs = self._stages.forward(work, inputs, keep_graph=not recomputed)
                self._offloaded.adopt(work, inputs)
                if stage < self._last_stage:
                    self._made[Message(Flow.ACTIVATION, work.microbatch, stage)] = outputs
                if self._keep_graphs:
                    self._graphs[key] = inputs, [] if recomputed else outputs
            case Kind.R:
                inputs, _ = self._graphs[key]
                outputs = self._stages.recompute(work, inputs)
                self._graphs[key] = inputs, outputs
                if stage < self._last_stage:
                    self._stages.release(outputs)  # the next stage has had them from F
            case Kind.B | Kind.BW:
                gradients: Tensors = [None]
                if stage < self._last_stage:
                    gradients = self._take(Message(Flow.GRADIENT, work.microbatch, stage + 1))
                # The gradient is here, so the activation it answers has been received: this only takes note of it.
                self.links.finish(Message(Flow.ACTIVATION, work.microbatch, stage))
                inputs, outputs = self._graphs.pop(key)
                tasks: list[WeightTask] = []
                with deferring(tasks) if work.kind is Kind.B else nullcontext():
                    input_gradients = self._stages.backward(work, inputs, outputs, gradients)
                if stage > 0:
                    self._made[Message(Flow.GRADIENT, work.microbatch, stage)] = input_gradients
                if work.kind is Kind.B:
                    self._weights[key] = [(task, self._recorder.hold(task.held)) for task in tasks]
            case Kind.W:
                _run(self._weights.pop(key))
            case _:
                self._stages.run_shard(work)

    def _take(self, message: Message) -> Tensors:
        """The tensors of a message: received, or made by another chunk of this rank and handed over."""
        if message in self._received:
            return self._received.pop(message)
        tensors = self._made.pop(message)
        handed_over = [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]
        if message.flow is Flow.ACTIVATION:
            self._stages.release(tensors)
        return handed_over

    def _send(self, message: Message, peer: int) -> None:
        tensors = self._made.pop(message)

        def sent() -> None:
            if message.flow is Flow.ACTIVATION:
                self._stages.release(tensors)

        self.links.send(message, peer, tensors, when_sent=sent)


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
