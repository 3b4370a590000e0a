"""Model stages that sleep instead of computing, for megatron-core and for torch.distributed.pipelining.

Sleeping needs no cores: 8 ranks run side by side on 2. What an iteration takes beyond the passes is the runtime's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig

from megatron.pipeline.backward.weight_tasks import notify, register_hook, submit
from megatron.pipeline.model.adapter import GPT
from megatron.pipeline.planner.schedule.core.costs import StageCosts
from megatron.pipeline.planner.schedule.core.loads import Load
from megatron.pipeline.runtime.p2p import Transport

HIDDEN = 64
AWAKE = 0.0005  # seconds at the end of a pass that are not slept: a sleep ends up to that much too late


def bind_to_core() -> None:
    """Bind this rank to one core, as on a cluster; ranks share the machine's cores. Where it may, which root may, it runs before
    all that is not a rank: what else the machine does is then no part of a measurement."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


class Interval(NamedTuple):
    """When a pass ran, in seconds of a clock that all processes of a machine share."""

    start: float
    end: float


class Sleeper:
    """The device of one rank: occupied for as long as passes take, while the host goes on, as it does with a GPU.

    What a runtime calls to run a pass is wrapped in ``step``. Within a step stages ``occupy`` the device; the step returns
    without waiting for that. A pass begins with its step, so the host's work within it is part of the pass, as it is in every
    measured cost, or when the pass before it ends. What others get has been computed: see ``precede_communication``.

    Attributes:
        slower: how many times as long as planned its passes take.
    """

    def __init__(self) -> None:
        self.passes: list[Interval] = []
        self.slower = 1.0
        self._steps = False  # whether a step runs now
        self._free = 0.0  # when the passes so far end

    def occupy(self, seconds: float) -> None:
        """Take a pass's time; outside of a step now."""
        start = self._free if self._steps else self.free
        self._free = start + seconds * self.slower
        if not self._steps:
            self.passes.append(Interval(start, self._free))

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that takes as long as the passes in it."""

        def occupying(*args: Any, **kwargs: Any) -> Any:
            start = self._free = self.free
            self._steps = True
            result = function(*args, **kwargs)
            self._steps = False
            if self._free > start:
                self.passes.append(Interval(start, self._free))
            return result

        return occupying

    def synchronize(self) -> None:
        """Sleep until all passes so far are over."""
        time.sleep(max(0.0, self._free - time.monotonic() - AWAKE))
        while time.monotonic() < self._free:
            pass

    def wait(self, end: float) -> None:
        """Have the passes to come begin at some time or later."""
        self._free = max(self._free, end)

    @property
    def free(self) -> float:
        """When all passes so far are over."""
        return max(self._free, time.monotonic())

    def precede_communication(self, *methods: str) -> None:
        """Have all calls of these methods of process groups, such as ``send``, wait for the device."""
        for name in methods:
            call: Callable[..., Any] = getattr(torch.distributed.ProcessGroup, name)

            def call_with_what_is_there(group: Any, *args: Any, call: Callable[..., Any] = call) -> Any:
                self.synchronize()
                return call(group, *args)

            setattr(torch.distributed.ProcessGroup, name, call_with_what_is_there)


class _Late:
    """Requests of a message that is late, and of the time at which it is there.

    Args:
        due: says when, of the clock of ``Interval``, once the requests are over.
    """

    def __init__(self, requests: Sequence[Any], due: Callable[[], float]) -> None:
        self._requests, self._due = requests, due

    def wait(self) -> bool:
        for request in self._requests:
            request.wait()
        time.sleep(max(0.0, self._due() - time.monotonic()))
        return True

    def is_completed(self) -> bool:
        return time.monotonic() >= self._due()


class SlowLinks:
    """Links whose messages are there later than they are; what else ranks do goes on.

    A message goes with another one that says when it is there. Process groups number ranks as the world does.

    Args:
        pairs: the two ranks of each link.
        holds: what a message on its way holds. ``nothing``; ``sender``: its send is over when it is there, as NCCL's are: stock
            waits for that, and ours asks whether it is, as on a GPU; ``link``: also, of messages in one direction each has to be
            there before the next one leaves.

    Attributes:
        delay: seconds of every message.
    """

    HOLDS = ("nothing", "sender", "link")

    def __init__(self, pairs: Sequence[Sequence[int]], holds: str, sleeper: Sleeper) -> None:
        self.delay = 0.0
        self._pairs, self._holds, self._sleeper = {frozenset(pair) for pair in pairs}, holds, sleeper
        self._due: dict[int, float] = {}  # of the last message to a rank
        for name, late in (("send", self._send), ("recv", self._receive)):
            setattr(torch.distributed.ProcessGroup, name, self._of(late, getattr(torch.distributed.ProcessGroup, name)))
        Transport._polls = property(lambda _: holds != "nothing", lambda *_: None)  # type: ignore[assignment]

    def _of(self, late: Callable[..., _Late], call: Callable[..., Any]) -> Callable[..., Any]:
        def choose(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            slow = self.delay and frozenset((group.rank(), peer)) in self._pairs
            return late(call, group, tensors, peer, tag) if slow else call(group, tensors, peer, tag)

        return choose

    def _send(self, call: Callable[..., Any], group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> _Late:
        self._sleeper.synchronize()
        leaves = time.monotonic()
        if self._holds == "link":
            leaves = max(leaves, self._due.get(peer, 0.0))
        self._due[peer] = due = leaves + self.delay
        says = torch.tensor([due], dtype=torch.float64)
        requests = call(group, [says], peer, tag + 1), call(group, tensors, peer, tag)
        return _Late(requests, lambda: 0.0 if self._holds == "nothing" else due)

    @staticmethod
    def _receive(call: Callable[..., Any], group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> _Late:
        says = torch.zeros(1, dtype=torch.float64)
        return _Late((call(group, [says], peer, tag + 1), call(group, tensors, peer, tag)), says.item)


class _Sleep(torch.autograd.Function):
    """Takes ``forward`` seconds to run forward, if any, and ``backward`` to run backward.

    With ``weight`` its weight gradient is a task of as many seconds, as those of megatron-core's linears are: fused in a BW, left
    to W by a B.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        sleeper: Sleeper,
        forward: float,
        backward: float,
        weight: float | None = None,
        parameter: torch.nn.Parameter | None = None,
    ) -> torch.Tensor:
        ctx.sleeper, ctx.seconds, ctx.weight, ctx.parameter = sleeper, backward, weight, parameter
        if forward:
            sleeper.occupy(forward)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.sleeper.occupy(ctx.seconds)
        if ctx.weight is not None:
            submit(SleepingWeight(ctx.sleeper, ctx.weight, ctx.parameter))
        return gradient.clone(), None, None, None, None, None


class SleepingWeight:
    """A task of weight gradients; DDP, if it has the weight, learns that its gradient of one microbatch, 0, is there."""

    held = ()

    def __init__(self, sleeper: Sleeper, seconds: float, parameter: torch.nn.Parameter | None) -> None:
        self._sleeper, self._seconds, self._parameter = sleeper, seconds, parameter

    def prefetch(self) -> None:
        """A sleeping weight needs no communication."""

    def run(self) -> None:
        self._sleeper.occupy(self._seconds)
        if self._parameter is not None and hasattr(self._parameter, "main_grad"):
            self._parameter.grad = torch.zeros_like(self._parameter)
            notify(self._parameter)


class SleepingLayer(torch.nn.Module):
    """A layer with one weight, whose gradients DDP reduces."""

    def __init__(self, sleeper: Sleeper, seconds: Sequence[float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, HIDDEN))
        self._sleeper, self._seconds = sleeper, seconds

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """DDP's, of delayed weight gradients."""
        register_hook(self, hook)

    def forward(self, hidden: torch.Tensor, load: Load) -> torch.Tensor:
        seconds = (one * times for one, times in zip(self._seconds, load, strict=False))
        output: torch.Tensor = _Sleep.apply(hidden, self._sleeper, *seconds, self.weight)
        return output


class MegatronStage(torch.nn.Module):
    """A stage of sleeping layers as megatron-core's schedules call it; weight gradients go where those of real linears go.

    Args:
        costs: of all its layers together.
        gives_loss: whether it is the last.

    Attributes:
        load: of the microbatch that comes next; its passes take as many times as long.
    """

    model_type = ModelType.encoder_or_decoder
    pipeline_adapter = GPT  # it is called as a GPT model is
    share_embeddings_and_output_weights = False

    def __init__(
        self, config: TransformerConfig, sleeper: Sleeper, costs: StageCosts, layers: int, vp_stage: int | None, gives_loss: bool
    ) -> None:
        super().__init__()
        self.config, self.vp_stage, self._gives_loss = config, vp_stage, gives_loss
        seconds = [each / layers for each in (costs.forward, costs.backward, costs.weight)]
        self.layers = torch.nn.ModuleList(SleepingLayer(sleeper, seconds) for _ in range(layers))
        self.load = Load()
        self._received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        self._received = tensors[0]

    def forward(self, tokens: torch.Tensor, _positions: None, _mask: None, labels: torch.Tensor) -> torch.Tensor:
        """Called as a GPT model is."""
        hidden = torch.zeros(1, 1, HIDDEN, requires_grad=True) if self._received is None else self._received
        for layer in self.layers:
            hidden = layer(hidden, self.load)
        return hidden.sum() if self._gives_loss else hidden


class TorchStage(torch.nn.Module):
    """A stage as torch.distributed.pipelining calls it, which splits a backward by asking autograd for some gradients only.

    The output is the sum of two branches, one from the input and one from the weight: a gradient for the input runs only the
    first, one for the weight only the second, and a whole backward both. On the first stage, whose input has no gradient,
    the first branch starts from an embedding; torch runs both of its branches in W.
    """

    def __init__(self, sleeper: Sleeper, costs: StageCosts, first: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, 1, HIDDEN))
        self.embedding = torch.nn.Parameter(torch.zeros(1, 1, HIDDEN)) if first else None
        self._sleeper, self._costs = sleeper, costs

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = _Sleep.apply(self.weight, self._sleeper, 0.0, self._costs.weight)
        if self.embedding is not None:
            received = received + self.embedding
        output: torch.Tensor = _Sleep.apply(received, self._sleeper, self._costs.forward, self._costs.backward) + bias
        return output
