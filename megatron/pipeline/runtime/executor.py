"""Interprets one rank's program for one iteration. Knows operations, not kinds of passes, families, losses or process groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from megatron.pipeline.monitor.device_progress import DeviceProgress
from megatron.pipeline.monitor.recorder import NullRecorder
from megatron.pipeline.planner import Kind, Pass, kinds, ops
from megatron.pipeline.runtime.p2p import Tensors, Transport
from megatron.pipeline.runtime.wiring import Wiring

Handler = Callable[[Pass, Tensors], Tensors]  # computes a pass from what it takes, [] for nothing, and returns what it makes
# The same for two passes that run as one: the function takes what the first makes, as soon as that is there and while the second
# runs on; returned is what the second makes.
Braid = Callable[[Pass, Tensors, Pass, Tensors, Callable[[Tensors], None]], Tensors]


class Background(Protocol):
    """Copies or collectives that run while passes do."""

    def start(self, started: Any, /) -> None:
        """Start a copy (a pass) or this rank's part in a collective, without waiting for its end."""

    def finish(self, started: Any, /) -> None:
        """Go on once it is over; on a GPU without the host."""


@dataclass(frozen=True)
class Handlers:
    """Functions that run the operations of a program: a new kind of pass needs one entry, and nothing else of the runtime.

    Attributes:
        passes: compute passes, by their kind.
        background: what runs while passes do, by the kind of a copy or the exchange of a collective.
        release: called with the outputs of a forward once the next stage has them: frees their data.
        abandon: called to let go of what is kept from one pass to another, when an iteration is given up.
        braid: computes two passes as one; None where no program has any.
        around: a context for every pass, such as the one that lets DDP reduce gradients.
    """

    passes: Mapping[Kind, Handler]
    background: Mapping[Kind | kinds.Exchange, Background] = field(default_factory=dict)
    release: Callable[[Tensors], None] = lambda _: None
    abandon: Sequence[Callable[[], None]] = ()
    braid: Braid | None = None
    around: Callable[[Pass], AbstractContextManager[None]] = lambda _: nullcontext()

    def joined(self, other: Handlers) -> Handlers:
        """These and those of other kinds; outputs are released, and passes run, as before."""
        passes, background = {**self.passes, **other.passes}, {**self.background, **other.background}
        return replace(self, passes=passes, background=background, abandon=(*self.abandon, *other.abandon))


class Executor:
    """One iteration of one rank, in two parts. It holds the tensors in flight, and none of them in the end.

    ``begin`` runs what may come before the optimizer step of the iteration before is known to be accepted. Then either
    ``finish`` runs the rest, or ``abandon`` leaves nothing of the iteration behind.

    Args:
        program, wiring: this rank's.
        handlers: run its passes, copies and collectives.
        transport: carries the messages.
        recorder: measures the passes, or does not.
        device: notes what has been launched on a GPU; None on a CPU, where an operation is over when it returns.

    Attributes:
        position: the operation that this rank's host is in, for a report of a hang; None before the first and after the last.
        begun: how many operations have begun; it distinguishes operations that look alike.
    """

    def __init__(
        self,
        program: ops.Program,
        wiring: Wiring,
        handlers: Handlers,
        transport: Transport,
        recorder: NullRecorder,
        device: DeviceProgress | None = None,
    ) -> None:
        self.program = program
        self.transport = transport
        self._wiring = wiring
        self._handlers = handlers
        self._recorder = recorder
        self._device = device
        self._left = deque(program)
        self._posted: dict[ops.Message, None] = {}  # receives that have not been waited for, in their order
        self._received: dict[ops.Message, Tensors] = {}
        self._made: dict[ops.Message, Tensors] = {}
        self.position: ops.Operation | None = None
        self.begun = 0

    def begin(self) -> None:
        """Run the program up to its validation; one without, to the end."""
        self._go_on()

    def finish(self) -> None:
        """Run what follows the validation."""
        self._go_on()
        self.transport.start()
        for sending in self.transport.unsent():
            self._at(sending)
            with self._recorder.wait(sending.message):
                self.transport.finish(sending.message, sending.peer)
        self.position = None

    def abandon(self) -> None:
        """Let go of what has begun. All ranks of the pipeline do so: for every message that was sent a receive is posted."""
        for message in self._posted:
            self._at(ops.Wait(message))
            self.transport.wait(message)
        for sending in self.transport.unsent():
            self._at(sending)
            self.transport.finish(sending.message, sending.peer)
        for abandon in self._handlers.abandon:
            abandon()
        self._posted.clear()
        self._received.clear()
        self._made.clear()
        self.position = None

    @property
    def reached(self) -> tuple[ops.Operation | None, int]:
        """The operation that this rank is in, and how many have begun: on a GPU the device's, which the host runs ahead of.

        May be asked from another thread.
        """
        number = self._device.current() if self._device else None
        return (self.position, self.begun) if number is None else (self.program[number - 1], number)

    def _go_on(self) -> None:
        handlers, transport, recorder = self._handlers, self.transport, self._recorder
        while self._left:
            operation = self._left.popleft()
            self._at(operation)
            number = self.begun  # a braid goes on while sends behind it begin
            if ops.starts_posted(operation):
                transport.start()
            match operation:
                case ops.Receive(message, peer):
                    transport.receive(message, peer)
                    self._posted[message] = None
                case ops.Wait(ops.Message() as message):
                    with recorder.wait(message):
                        self._received[message] = transport.wait(message)
                    del self._posted[message]
                case ops.Compute(work, braided):
                    within = handlers.around(braided) if braided else nullcontext()
                    with handlers.around(work), within, recorder.measure(work):
                        self._compute(work, braided)
                    transport.sweep()
                case ops.Send(message, peer):
                    self._send(message, peer)
                case ops.Join(collective):
                    transport.keep_order()
                    handlers.background[collective.exchange].start(collective)
                case ops.Wait(ops.Collective() as collective):
                    with recorder.wait(collective):
                        handlers.background[collective.exchange].finish(collective)
                case ops.Copy(work):
                    handlers.background[work.kind].start(work)
                    self._note(operation)
                case ops.Wait(Pass() as work):
                    with recorder.wait(work):
                        handlers.background[work.kind].finish(work)
                    self._note(operation)
                case ops.Validate():
                    return
            if self._device and isinstance(operation, (ops.Compute, ops.Wait)):
                self._device.launched(number, isinstance(operation, ops.Compute))

    def _note(self, operation: ops.Operation) -> None:
        """Record what is held where the schedule has a copy: at its start, or at its end."""
        if (copy := ops.pass_of(operation)) is not None:
            self._recorder.reach(copy)

    def _at(self, operation: ops.Operation) -> None:
        self.position = operation
        self.begun += 1

    def _compute(self, work: Pass, braided: Pass | None) -> None:
        if self._device:
            self._device.catch_up()
        if work.kind.row.braided:  # it has run with the pass before it
            return
        if braided is None:
            self._hand_out(work, self._handlers.passes[work.kind](work, self._take(work)))
            return
        assert self._handlers.braid is not None, f"{braided} is braided, and nothing runs braids"
        made = partial(self._send_within_braid, work)
        self._hand_out(braided, self._handlers.braid(work, self._take(work), braided, self._take(braided), made))

    def _send_within_braid(self, work: Pass, outputs: Tensors) -> None:
        """Send what the forward of a braid has made, while its backward runs on. The sends stand directly behind it; on a GPU
        they wait for the stream that is current here. Posted in batches, they start with the operation after them."""
        braid = self.position
        self._hand_out(work, outputs)
        while self._left and isinstance(sending := self._left[0], ops.Send):
            self._at(self._left.popleft())
            self._send(sending.message, sending.peer)
        self.position = braid

    def _hand_out(self, work: Pass, outputs: Tensors) -> None:
        """Keep what a pass has made for the one that takes it."""
        if (message := self._wiring.makes.get(work)) is not None:
            self._made[message] = outputs

    def _take(self, work: Pass) -> Tensors:
        """The tensors that a pass takes: received, or made by another chunk of this rank and handed over; [] for none."""
        message, sent = self._wiring.takes.get(work), self._wiring.answers.get(work)
        if message is None:
            tensors = []
        elif message in self._received:
            tensors = self._received.pop(message)
        else:
            made = self._made.pop(message)
            tensors = [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in made]
            self._gone(message, made)
        if sent is not None:
            self.transport.finish(*sent)  # its answer is here, so it has been received: this only takes note of it
        return tensors

    def _send(self, message: ops.Message, peer: int) -> None:
        tensors = self._made.pop(message)
        self.transport.send(message, peer, tensors, when_sent=lambda: self._gone(message, tensors))

    def _gone(self, message: ops.Message, tensors: Tensors) -> None:
        """The next stage has got a message."""
        if message.flow is kinds.Flow.ACTIVATION:
            self._handlers.release(tensors)
