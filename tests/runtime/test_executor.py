"""The executor runs what a program says, and any kind of pass."""

from __future__ import annotations

import pytest

from megatron.pipeline.monitor.recorder import NullRecorder
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Collective, Compute, Exchange, Flow, Join, Message, Send, Wait
from megatron.pipeline.runtime.executor import Executor, Handlers
from megatron.pipeline.runtime.p2p import Tensors, Transport
from megatron.pipeline.runtime.wiring import wiring


@pytest.mark.parametrize("name", families.FAMILIES)
def test_neighbours_in_the_model_are_connected(name: str) -> None:
    """By messages, or on one rank without; a backward answers the activations that its stage has sent."""
    schedule = planning.plan(name, 4, 8)
    placement, last = schedule.placement, schedule.placement.last_stage
    for rank, program in enumerate(lower(schedule, uniform(placement))):
        connected = wiring(program, rank, placement)
        for work in schedule.passes[rank]:
            stage = placement.stage(rank, work.chunk)
            activation, gradient = (Message(flow, work.microbatch, stage) for flow in (Flow.ACTIVATION, Flow.GRADIENT))
            before, after = stage > 0, stage < last
            found = takes, makes, answers = tuple(table.get(work) for table in connected)  # type: ignore[attr-defined]
            if work.kind is Kind.F:
                assert takes == (activation._replace(stage=stage - 1) if before else None)
                assert (makes, answers) == (activation if after else None, None)
            elif work.kind.sends_gradient:
                assert takes == (gradient._replace(stage=stage + 1) if after else None)
                assert makes == (gradient if before else None)
                assert answers == ((activation, placement.home(stage + 1)[0]) if after else None)
            else:
                assert found == (None, None, None)


def test_a_kind_needs_one_handler() -> None:
    """Here those of copies and of vocabularies, which do something else than usual."""
    done: list[str] = []

    class Beside:
        def start(self, started: Pass | Collective) -> None:
            done.append(f"start {started}")

        def finish(self, started: Pass | Collective) -> None:
            done.append(f"finish {started}")

    def handler(work: Pass, received: Tensors) -> Tensors:
        assert not received
        done.append(str(work))
        return []

    sums = Collective(Exchange.STATISTICS, 0)
    program = (Compute(Pass(Kind.S, 0)), Join(sums), Compute(Pass(Kind.T, 1)), Wait(sums))
    handlers = Handlers({Kind.S: handler}).joined(Handlers({Kind.T: handler}, {Exchange.STATISTICS: Beside()}))
    executor = Executor(program, wiring(program, 0, linear(1)), handlers, NoTransport(), NullRecorder())
    executor.begin()
    executor.finish()
    assert done == ["S0.0", f"start {sums}", "T1.0", f"finish {sums}"]


class NoTransport(Transport):
    """For a rank that is alone."""

    def __init__(self) -> None:
        """Nothing is sent."""

    def start(self) -> None:
        """Nothing is batched."""

    def keep_order(self) -> None:
        """Nothing is received."""

    def sweep(self) -> None:
        """Nothing is on its way."""

    def unsent(self) -> list[Send]:
        return []
