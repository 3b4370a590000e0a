"""Braided schedules train as megatron-core's own 1F1B does, with or without anything that runs concurrently in a braid."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_gpt
from marked import rest
from pool import Pool

from megatron.pipeline.monitor.recorder import NullRecorder
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.kinds import Kind
from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Compute, Message, Send, Wait
from megatron.pipeline.planner.schedule.transforms.braid import braid
from megatron.pipeline.runtime.executor import Executor, Handlers
from megatron.pipeline.runtime.p2p import Tensors
from megatron.pipeline.runtime.wiring import wiring


class Hiding(Costs):
    """Costs with which braids pay."""

    def braid(self, stage: int, kind: Kind, other: int, microbatches: tuple[int, int] = (0, 0)) -> tuple[float, float]:
        return 0.6 * self.seconds(Kind.F, stage), 0.6 * self.seconds(kind, other)


@pytest.mark.parametrize(("name", "pp"), [("zb-v", 2), rest("v-half", 4), ("dualpipe-v", 4), rest("interleaved", 2)])
def test_a_braided_schedule_trains_as_stock(pool: Pool, tmp_path: Path, name: str, pp: int) -> None:
    schedule = planning.plan(name, pp, 2 * pp)
    costs = Hiding((StageCosts(1.0, 1.0, 1.0),) * (schedule.placement.last_stage + 1))
    braided = braid(schedule, Problem(schedule.placement, schedule.microbatches, costs))
    assert any(row.is_braided for row in braided.rows)
    (tmp_path / "braided.json").write_text(braided.to_json())
    flags = ("--num-layers", "8", "--clip-grad", "0", "--lr", "1e-3")
    ours, stock = (
        pool.run(pp, tiny_gpt.train, one, pp=pp, microbatches=2 * pp, iterations=3, flags=flags)
        for one in (f"file:{tmp_path}/braided.json", "stock")
    )
    assert losses(ours) == losses(stock)
    assert len(set(losses(ours))) == 3


def losses(ranks: list[list[tiny_gpt.Step]]) -> list[float | None]:
    """On the rank that has them."""
    return next([loss for loss, _ in steps] for steps in ranks if steps[0][0] is not None)


class Sends:
    """A transport that notes when messages leave."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def send(self, message: Message, *_: Any, when_sent: Any) -> None:
        self.events.append(f"send {message.flow} {message.microbatch}")

    def wait(self, message: Message) -> Tensors:
        self.events.append(f"wait {message.flow} {message.microbatch}")
        return [None]

    def nothing(self, *_: Any) -> None:
        """What the test does not look at."""

    start = sweep = receive = finish = nothing

    def unsent(self) -> list[Send]:
        return []


def test_what_a_braids_forward_makes_is_sent_while_its_backward_runs() -> None:
    rows = ("F0 F1 F2 FB0 W0 B1 W1 B2 W2", "F0 B0 W0 F1 B1 W1 F2 B2 W2")
    passes = tuple(tuple(Pass.parse(f"{work}.0") for work in row.split()) for row in rows)
    schedule = Schedule("mine", linear(2), 3, passes)
    program = lower(schedule, Costs((StageCosts(1.0, 1.0, 1.0),) * 2))[0]
    events: list[str] = []
    position: list[str] = []

    def run(work: Pass, _: Tensors) -> Tensors:
        events.append(str(work))
        return [None]

    def braided(work: Pass, _: Tensors, other: Pass, __: Tensors, made: Any) -> Tensors:
        events.append(f"{work} and {other}")
        made([None])
        position.append(str(executor.position))
        events.append(f"end of {other}")
        return [None]

    transport: Any = Sends(events)
    handlers = Handlers(dict.fromkeys(Kind, run), braid=braided)
    launched: list[int] = []
    device: Any = SimpleNamespace(catch_up=lambda: None, launched=lambda number, _: launched.append(number))
    executor = Executor(program, wiring(program, 0, linear(2)), handlers, transport, NullRecorder(), device=device)
    executor.begin()
    executor.finish()
    assert launched == [number for number, one in enumerate(program, start=1) if isinstance(one, Compute | Wait)]
    at = events.index("F2.0 and FB0.0")
    assert events[at : at + 4] == ["F2.0 and FB0.0", "send activation 2", "end of FB0.0", "W0.0"]
    assert events.count("send activation 2") == 1
    assert position == [str(Compute(Pass(Kind.F, 2), Pass(Kind.FB, 0)))]
    assert executor.begun == len(program)
