"""On a GPU, where a rank is is where its device is, however far its host has run ahead."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.pipeline.monitor.device_progress import DeviceProgress
from megatron.pipeline.monitor.progress import Situation
from megatron.pipeline.monitor.recorder import NullRecorder
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.stage_costs import VocabularyCosts
from megatron.pipeline.planner.schedule.lower.posting import LEAD, leads, message_buffers
from megatron.pipeline.planner.schedule.lower.program import Compute, Flow, Message, Program, Receive, Send, Wait
from megatron.pipeline.runtime.executor import Executor, Handlers
from megatron.pipeline.runtime.iteration import Iteration
from megatron.pipeline.runtime.wiring import Wiring

GRADIENT = Message(Flow.GRADIENT, 0, 1)
PROGRAM: Program = (Compute(Pass(Kind.F, 0)), Receive(GRADIENT, 1), Wait(GRADIENT), Compute(Pass(Kind.B, 0)))


class Event:
    """Reached once the device has come as far as the test says."""

    device = 0
    recorded = 0

    def record(self) -> None:
        Event.recorded += 1
        self._place = Event.recorded

    def query(self) -> bool:
        return self._place <= Event.device

    def synchronize(self) -> None:
        Event.device = max(Event.device, self._place)


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)


def run_ahead() -> Iteration:
    """An iteration whose host has launched everything."""
    Event.device = Event.recorded = 0
    transport: Any = SimpleNamespace(
        receive=lambda *_: None, wait=lambda _: [], start=lambda: None, sweep=lambda: None, unsent=list, finish=lambda *_: None
    )
    handlers = Handlers({Kind.F: lambda *_: [], Kind.B: lambda *_: []})
    executor = Executor(PROGRAM, Wiring({}, {}, {}), handlers, transport, NullRecorder(), device=DeviceProgress((0, 1)))
    channels: Any = SimpleNamespace(ranks=(10, 11))
    iteration = Iteration(plan=None, channels=channels)  # type: ignore[arg-type]
    iteration.executor = executor
    executor.begin()
    executor.finish()
    return iteration


def test_the_device_is_reported() -> None:
    iteration = run_ahead()
    first = iteration.situation(1)
    assert first.place == "Compute F0.0" and first.in_iteration and first.of_device
    Event.device = 1
    second = iteration.situation(1)
    assert second.place == "Wait gradient of microbatch 0 from stage 1, for B0.0"
    assert second.waits_for == 11 and second.finished == ("F0.0",)
    assert second.progress != first.progress
    Event.device = 3
    assert iteration.situation(1) == Situation(progress=(1, 0, 4))


def test_events_are_let_go_of() -> None:
    progress = DeviceProgress(())
    Event.device, Event.recorded = 5, 0
    for number in range(5):
        progress.launched(number)
    assert not progress._launched and progress.current() is None


def ahead_at_each_launch(passes: list[Pass], lead: tuple[int, ...]) -> list[list[Pass]]:
    """What the device has yet to end when the host launches each pass, if it ends no pass before the host waits for it."""
    Event.device = Event.recorded = 0
    ahead: list[list[Pass]] = []

    def launch(*_: Any) -> list[Any]:
        ahead.append(passes[Event.device : Event.recorded])
        return []

    transport: Any = SimpleNamespace(start=lambda: None, sweep=lambda: None, unsent=list)
    handlers = Handlers(dict.fromkeys({work.kind for work in passes}, launch))
    program: Program = tuple(map(Compute, passes))
    Executor(program, Wiring({}, {}, {}), handlers, transport, NullRecorder(), device=DeviceProgress(lead)).begin()
    assert len(ahead) == len(passes)
    return ahead


def program_of(passes: list[Pass]) -> Program:
    return tuple(map(Compute, passes))


def test_the_host_is_only_some_passes_ahead() -> None:
    """Memory of messages returns when the device has come past them, so the lead is what it needs."""
    passes = [Pass(Kind.F, microbatch) for microbatch in range(20)]
    ahead = ahead_at_each_launch(passes, leads(program_of(passes), dict.fromkeys(passes, 3.0)))
    assert max(map(len, ahead)) == LEAD - 1


def test_the_host_is_as_far_ahead_as_a_forward_is_long() -> None:
    """Behind passes of the vocabulary the device would otherwise have nothing to do while the host launches a forward."""
    seconds = {Kind.F: 3.0, Kind.S: 0.7, Kind.T: 0.5, Kind.IB: 0.05}
    passes = [Pass(kind, microbatch) for microbatch in range(20) for kind in seconds]
    lengths = {work: seconds[work.kind] for work in passes}
    lead = leads(program_of(passes), lengths)
    for number, left in enumerate(ahead_at_each_launch(passes, lead)):
        assert left == passes[:number][-len(left) :] if left else number == 0
        assert sum(lengths[work] for work in left) >= 3 or len(left) == number
        assert len(left) <= LEAD, "no further than that takes"


def test_messages_that_take_memory_are_counted() -> None:
    first, second = Message(Flow.ACTIVATION, 0, 0), Message(Flow.ACTIVATION, 1, 0)
    assert message_buffers(PROGRAM, (0, 1)) == 1
    both: Program = (Receive(first, 0), Receive(second, 0), Wait(first), Compute(Pass(Kind.F, 0)), Wait(second))
    assert message_buffers(both, (0,)) == 2
    sends: Program = tuple(
        one for number in range(20) for one in (Compute(Pass(Kind.F, number)), Send(Message(Flow.ACTIVATION, number, 0), 1))
    )
    for lead in (LEAD - 1, LEAD + 3):
        assert message_buffers(sends, [min(number, lead) for number in range(20)]) == lead + 2


def test_what_messages_take_does_not_grow_with_the_iteration() -> None:
    shards = VocabularyCosts(S=0.2, T=0.2, IF=0.02, IB=0.02)
    spread: dict[str, Any] = {"vocabulary": Vocabulary.ONE_BARRIER, "costs": partial(uniform, vocabulary=shards)}
    for name, extra in (("1f1b", {}), ("zb-h1", {}), ("zb-v", {}), ("zb-h1", spread), ("zb-v", spread)):
        plans = [planning.Request(name, 4, microbatches, **extra).plan() for microbatches in (16, 32, 64)]
        counts = [plan.message_buffers for plan in plans]
        assert counts[0] == counts[1] == counts[2] <= 4 * (LEAD + 1), (name, extra)
