"""The executor runs what a program says: stages that form a graph, which no placement describes, and any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pool import Pool

from megatron.pipeline import planning
from megatron.pipeline.record.recorder import Unmeasured
from megatron.pipeline.runtime.executor import Executor, Handlers, Job
from megatron.pipeline.runtime.p2p import Channels, Tensors, Transport
from megatron.pipeline.runtime.stage_passes import StagePasses
from megatron.pipeline.runtime.wiring import wiring
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import uniform
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.placement import linear
from megatron.pipeline.schedule.lower.lower import lower
from megatron.pipeline.schedule.lower.posting import Posting
from megatron.pipeline.schedule.lower.program import (
    Collective,
    Compute,
    Exchange,
    Flow,
    Join,
    Message,
    Program,
    Receive,
    Send,
    Wait,
)

WIDTH, MICROBATCHES = 8, 3
# A diamond with a skip: 0 feeds 1, 2 and 3; 1 and 2 feed 3. Stage s is on rank s.
BEFORE: dict[int, tuple[int, ...]] = {0: (), 1: (0,), 2: (0,), 3: (0, 1, 2)}
BEHIND = {stage: tuple(other for other in BEFORE if stage in BEFORE[other]) for stage in BEFORE}


def layer_of(stage: int) -> torch.nn.Linear:
    torch.manual_seed(stage)
    return torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def data(microbatch: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + microbatch))


def compute(stage: int, layer: torch.nn.Linear, microbatch: int, inputs: Tensors) -> torch.Tensor:
    """A stage multiplies what it takes; the last one's output is the loss."""
    product = data(microbatch)
    for received in inputs:
        if received is not None:
            product = product * received
    output: torch.Tensor = torch.tanh(layer(product))
    return output.square().mean() if stage == max(BEFORE) else output


class TinyStages:
    """The stage of this rank, as ``StagePasses`` calls it."""

    def __init__(self, stage: int) -> None:
        self.stage, self.layer = stage, layer_of(stage)
        self.released = 0

    def forward(self, work: Pass, inputs: Tensors, keep_graph: bool) -> Tensors:
        return [compute(self.stage, self.layer, work.microbatch, inputs)]

    def recompute(self, work: Pass, inputs: Tensors) -> Tensors:
        raise AssertionError("nothing is recomputed here")

    def backward(self, work: Pass, inputs: Tensors, outputs: Tensors, gradients: Tensors) -> Tensors:
        torch.autograd.backward([output for output in outputs if output is not None], gradients)
        return [None if tensor is None else tensor.grad for tensor in inputs]

    def release(self, outputs: Tensors) -> None:
        self.released += 1


def program_of(stage: int) -> Program:
    """All forwards, then all backwards, of one stage of the graph."""
    program: list[Any] = []
    for flow, kind, sources, targets in (
        (Flow.ACTIVATION, Kind.F, BEFORE[stage], BEHIND[stage]),
        (Flow.GRADIENT, Kind.BW, BEHIND[stage], BEFORE[stage]),
    ):
        for microbatch in range(MICROBATCHES):
            expected = [Message(flow, microbatch, source) for source in sources]
            program += [Receive(message, message.stage) for message in expected] + [Wait(message) for message in expected]
            program.append(Compute(Pass(kind, microbatch)))
            program += [Send(Message(flow, microbatch, stage), target) for target in targets]
    return tuple(program)


def run_graph(posting: str) -> tuple[list[float], int]:
    """This rank's gradients, and how many outputs were released."""
    rank, world = torch.distributed.get_rank(), torch.distributed.group.WORLD
    assert world is not None
    shapes = {flow: [(2, WIDTH)] for flow in Flow}
    transport = Transport(Channels.open(world, False), shapes, torch.float64, torch.device("cpu"), Posting(posting))
    program, stages = program_of(rank), TinyStages(rank)
    executor = Executor(program, wiring(program, rank, linear(4)), StagePasses(stages, program).handlers, transport, Unmeasured())
    executor.begin()
    executor.finish()
    return torch.cat([parameter.grad.flatten() for parameter in stages.layer.parameters()]).tolist(), stages.released  # type: ignore


@pytest.mark.parametrize("posting", ["single", "batched"])
def test_stages_that_form_a_graph(pool: Pool, posting: str) -> None:
    layers = [layer_of(stage) for stage in BEFORE]
    for microbatch in range(MICROBATCHES):
        outputs: dict[int, torch.Tensor] = {}
        for stage, before in BEFORE.items():
            outputs[stage] = compute(stage, layers[stage], microbatch, [outputs[source] for source in before])
        outputs[max(BEFORE)].backward()
    whole = [torch.cat([parameter.grad.flatten() for parameter in layer.parameters()]).tolist() for layer in layers]  # type: ignore
    for stage, (gradients, released) in enumerate(pool.run(4, run_graph, posting)):
        assert gradients == pytest.approx(whole[stage], rel=1e-12)
        assert released == (MICROBATCHES if BEHIND[stage] else 0), "once, when all that need it have it"


@pytest.mark.parametrize("name", [name for name in families.FAMILIES if families.placement(name, 4).replicas == 1])
def test_neighbours_in_the_model_are_connected(name: str) -> None:
    """By messages, or on one rank without; a backward answers the activations that its stage has sent."""
    schedule = planning.plan(name, 4, 8)
    placement, last = schedule.placement, schedule.placement.last_stage
    for rank, program in enumerate(lower(schedule, uniform(placement))):
        connected = wiring(program, rank, placement)
        for work in schedule.passes[rank]:
            stage = placement.stage(rank, work.chunk)
            before, after = (
                ((Message(flow, work.microbatch, stage), placement.home(neighbour)[0]),) if 0 <= neighbour <= last else ()
                for flow, neighbour in ((Flow.GRADIENT, stage - 1), (Flow.ACTIVATION, stage + 1))
            )
            needs_before = tuple((Message(Flow.ACTIVATION, work.microbatch, stage - 1), peer) for _, peer in before)
            needs_after = tuple((Message(Flow.GRADIENT, work.microbatch, stage + 1), peer) for _, peer in after)
            takes, makes, answers = (table.get(work, ()) for table in connected)
            if work.kind is Kind.F:
                assert (takes, makes, answers) == (needs_before, after, ())
            elif work.kind.sends_gradient:
                assert (takes, makes, answers) == (needs_after, before, after)
            else:
                assert (takes, makes, answers) == ((), (), ())


def test_a_kind_needs_one_handler() -> None:
    """Here those of copies and of vocabularies, which do something else than usual."""
    done: list[str] = []

    class Beside:
        def start(self, started: Pass | Collective) -> None:
            done.append(f"start {started}")

        def finish(self, started: Pass | Collective) -> None:
            done.append(f"finish {started}")

    def handler(job: Job) -> Mapping[int, Tensors]:
        assert (job.received, job.peers) == ({}, ())
        done.append(str(job.work))
        return {}

    sums = Collective(Exchange.STATISTICS, 0)
    program = (Compute(Pass(Kind.S, 0)), Join(sums), Compute(Pass(Kind.T, 1)), Wait(sums))
    handlers = Handlers({Kind.S: handler}).joined(Handlers({Kind.T: handler}, {Exchange.STATISTICS: Beside()}))
    executor = Executor(program, wiring(program, 0, linear(1)), handlers, NoTransport(), Unmeasured())
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
