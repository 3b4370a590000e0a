"""Schedules to compare, each ready to run iterations of sleeping stages on this rank."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from sleeping import HIDDEN, MegatronStage, Sleeper, TorchStage, bind_to_core
from torch.distributed import pipelining

from megatron.pipeline import patches, planning
from megatron.pipeline.distributed.groups import new_group
from megatron.pipeline.record.recorder import NullRecorder
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.runtime.every_batch import EveryBatch
from megatron.pipeline.runtime.iteration import Iteration
from megatron.pipeline.runtime.p2p import Channels
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import Costs, uniform
from megatron.pipeline.schedule.core.loads import Load
from megatron.pipeline.schedule.core.names import STOCK
from megatron.pipeline.schedule.core.placement import Placement, interleaved, v
from megatron.pipeline.schedule.core.problem import Objective
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.core.timeline import Timeline
from megatron.pipeline.schedule.lower.posting import Posting
from megatron.pipeline.schedule.lower.torch_csv import from_csv
from megatron.pipeline.schedule.time.simulate import simulate

# Where megatron-core and we run passes; W is a call of ours.
STEPS: tuple[Callable[..., Any], ...] = (schedules.forward_step, schedules.backward_step)


class Times:
    """F, B and W of a rank's whole share and one hop, in seconds."""

    def __init__(self, forward: float, backward: float, weight: float, hop: float) -> None:
        self._passes, self.hop = (forward, backward, weight), hop

    def of(self, placement: Placement) -> Costs:
        return uniform(placement, *self._passes, hop=self.hop)


class Contender(Protocol):
    """A schedule in a runtime.

    Attributes:
        name: how it is called in the table.
        schedule: the passes that it runs, for the simulation.
        costs: what these take, with messages.
    """

    name: str
    schedule: Schedule
    costs: Costs

    def iterate(self) -> None:
        """Run this rank's part of one iteration."""


def simulated(contender: Contender, free: bool = False) -> Timeline:
    """When its passes should run.

    Args:
        free: messages take no time.
    """
    return simulate(contender.schedule, replace(contender.costs, hop=0.0) if free else contender.costs)


class Megatron:
    """Iterations of sleeping stages in functions with the signature of megatron-core's schedules.

    One set of process groups serves all.
    """

    def __init__(self, times: Times, microbatches: int, sleeper: Sleeper) -> None:
        self.times, self.microbatches = times, microbatches
        self.ranks, self._rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        self._sleeper = sleeper
        alone, world = new_group([self._rank]), torch.distributed.group.WORLD
        assert world is not None, "init_process_group comes first"
        self.channels = Channels.open(world, variable_lengths=False)
        self._groups = ProcessGroupCollection()
        self._groups.tp = self._groups.cp = self._groups.dp_cp = alone
        self._groups.embd = self._groups.pos_embd = None
        self._groups.pp = world

    def stages(self, placement: Placement, costs: Costs) -> list[MegatronStage]:
        """This rank's chunks."""
        chunks, config = placement.chunks, configuration(placement)
        return [
            MegatronStage(
                config, self._sleeper, costs.stages[stage], chunk if chunks > 1 else None, stage == placement.last_stage
            )
            for chunk, stage in enumerate(placement.stages[self._rank])
        ]

    def run(self, forward_backward: Callable[..., Any], model: list[MegatronStage], data: Sequence[Any] = ()) -> None:
        """Args: data: an iterator of microbatches for each chunk; equal ones without."""
        schedules.forward_step, schedules.backward_step = map(self._sleeper.step, STEPS)
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=list(data) or [None] * len(model),
            model=model,
            num_microbatches=self.microbatches,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=P2PCommunicator(self._groups.pp, model[0].config),
            pg_collection=self._groups,
        )

    def title(self, options: argparse.Namespace, *facts: str) -> str:
        """What was measured, above a table."""
        milliseconds = "/".join(f"{value:g}" for value in options.milliseconds)
        shared = [f"{self.ranks} ranks", f"{options.microbatches} microbatches", f"F/B/W = {milliseconds} ms", *facts]
        shared += [f"median of {options.rounds} rounds", f"hop {1e3 * self.times.hop:.2f} ms", f"load {os.getloadavg()[0]:.1f}"]
        return ", ".join(shared)


def configuration(placement: Placement) -> TransformerConfig:
    """The configuration of a model of sleeping stages."""
    chunks = placement.chunks
    return TransformerConfig(
        num_layers=placement.ranks * chunks,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=placement.ranks,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=chunks == 1,
        overlap_p2p_comm=chunks > 1,  # as Megatron-LM does unless told otherwise
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
    )


class Microbatch(NamedTuple):
    """The lengths of its sequences, and what they are to its passes."""

    lengths: Sequence[int]
    load: Load


def forward_step(data: Iterator[Microbatch] | None, stage: Any) -> tuple[Any, Callable[[torch.Tensor], Any]]:
    """What megatron-core and we call for a forward, on a microbatch of one token."""
    if data is not None:
        stage.load = next(data).load
    token = torch.zeros(1, 1, dtype=torch.int64)
    return stage(token, None, None, labels=token), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return output.sum(), {"loss": output.detach().sum()}


def start(microbatches: int, milliseconds: Sequence[float]) -> tuple[Sleeper, Megatron]:
    """This rank's device, and megatron-core's schedules on it, in a world of all processes that torchrun has started.

    Args:
        milliseconds: of F, B and W.
    """
    patches.install()
    torch.set_num_threads(1)
    bind_to_core()
    torch.distributed.init_process_group("gloo")
    sleeper = Sleeper()
    hop = _measure_hop(sleeper)
    sleeper.precede_communication()
    forward, backward, weight = (value / 1000 for value in milliseconds)
    return sleeper, Megatron(Times(forward, backward, weight, hop), microbatches, sleeper)


def _measure_hop(sleeper: Sleeper, rounds: int = 20) -> float:
    """Median seconds from the end of a pass on one rank to its message's arrival at the next, which waits for it."""
    rank, tensor = torch.distributed.get_rank(), torch.zeros(1, 1, HIDDEN)
    seconds = []
    for _ in range(rounds):
        moment = torch.zeros(1, dtype=torch.float64)
        torch.distributed.barrier()
        if rank == 0:
            sleeper.occupy(0.02)
            sleeper.synchronize()
            moment[0] = time.monotonic()
            torch.distributed.send(tensor, 1)
        elif rank == 1:
            torch.distributed.recv(tensor, 0)
            arrived = time.monotonic()
        torch.distributed.broadcast(moment, 0)
        if rank == 1:
            seconds.append(arrived - moment.item())
    hop = torch.tensor([statistics.median(seconds) if rank == 1 else 0.0], dtype=torch.float64)
    torch.distributed.broadcast(hop, 1)
    return hop.item()


class Ours:
    """A schedule in our executor.

    Args:
        name: of a family, with ``@X`` behind it for room for X times the activations of 1F1B, and then ``/batched`` for
            messages that are started together. Planned is the shortest makespan.
    """

    def __init__(self, name: str, megatron: Megatron) -> None:
        self.name, self._megatron = name, megatron
        name, _, posting = name.partition("/")
        family, _, memory = name.partition("@")
        ranks, microbatches = megatron.ranks, megatron.microbatches
        placement = families.placement(family, ranks)
        self.costs = costs = megatron.times.of(placement)
        limit = float(memory) * ranks if memory else None
        # Every rank plans: a plan depends on nothing but its request.
        plan = planning.Request(family, ranks, microbatches, costs, None, limit, objective=Objective.MAKESPAN).plan()
        self.schedule = plan.schedule
        self._iteration = partial(Iteration, plan, megatron.channels, NullRecorder, Posting(posting or "single"))
        self.model = megatron.stages(placement, costs)
        self.data: Sequence[Any] = ()

    def iterate(self) -> None:
        self._megatron.run(lambda **keywords: self._iteration().run(Call(**keywords)), self.model, self.data)


class EveryBatchOurs:
    """A family whose order is planned for every batch, in our runtime.

    Attributes:
        pipeline: whose plan of the last iteration ``schedule`` has.
    """

    def __init__(self, name: str, megatron: Megatron, settings: EveryBatch) -> None:
        self.name, self._megatron = f"{name}, every batch", megatron
        placement = families.placement(name, megatron.ranks)
        self.costs = megatron.times.of(placement)
        request = planning.Request(name, megatron.ranks, megatron.microbatches, self.costs, objective=Objective.MAKESPAN)
        self.pipeline = Pipeline(request, every_batch=settings)
        self.schedule = self.pipeline.plans.plan(megatron.microbatches).schedule
        self.model = megatron.stages(placement, self.costs)
        self.data: Sequence[Any] = ()

    def iterate(self) -> None:
        self._megatron.run(self.pipeline.forward_backward, self.model, self.data)
        iteration = self.pipeline._iteration
        assert iteration is not None, "one has run"
        self.schedule = iteration.plan.schedule


class Stock:
    """megatron-core's own schedule: 1F1B, or with two chunks interleaved."""

    def __init__(self, chunks: int, megatron: Megatron) -> None:
        family = "1f1b" if chunks == 1 else "interleaved"
        self.name, self._megatron = f"{STOCK} {family}", megatron
        self.schedule = planning.plan(family, megatron.ranks, megatron.microbatches)  # the same order of the same passes
        self._forward_backward = schedules.get_forward_backward_func(megatron.ranks, chunks if chunks > 1 else None)
        self.costs = megatron.times.of(self.schedule.placement)
        self.model = megatron.stages(self.schedule.placement, self.costs)
        self.data: Sequence[Any] = ()

    def iterate(self) -> None:
        self._megatron.run(self._forward_backward, self.model, self.data)


class Torch:
    """A schedule of torch.distributed.pipelining, in torch's own runtime."""

    def __init__(self, name: str, times: Times, microbatches: int, sleeper: Sleeper) -> None:
        self.name = f"torch {name}"
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if name == "1F1B":
            placement = interleaved(ranks, 1)
        else:
            placement = interleaved(ranks, 2) if name.startswith("Interleaved") else v(ranks)
        self.costs, count, mine = times.of(placement), placement.last_stage + 1, placement.stages[rank]
        sleeping = {stage: TorchStage(sleeper, self.costs.stages[stage], stage == 0) for stage in mine}
        stages = [pipelining.PipelineStage(one, stage, count, torch.device("cpu")) for stage, one in sleeping.items()]
        for stage in stages:
            for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, method, sleeper.step(getattr(stage, method)))
        own = getattr(pipelining.schedules, f"Schedule{name}")
        self._schedule = own(stages[0] if len(stages) == 1 else stages, microbatches, loss_fn=lambda output, _: output.sum())
        self._first, self._last = 0 in mine, count - 1 in mine
        self._data = torch.zeros(microbatches, 1, HIDDEN)
        self.schedule = planning.plan("1f1b", ranks, microbatches) if name == "1F1B" else self._passes()

    def iterate(self) -> None:
        inputs = [self._data] if self._first else []
        self._schedule.step(*inputs, target=self._data if self._last else None, return_outputs=False)

    def _passes(self) -> Schedule:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "passes.csv"
            self._schedule._dump_csv(str(path), format="compute_only")
            return from_csv(path.read_text(), self.name)
