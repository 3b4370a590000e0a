"""Schedules to compare, each ready to run iterations of sleeping stages on this rank."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from sleeping import HIDDEN, MegatronStage, Sleeper, TorchStage, bind_to_core
from torch.distributed import pipelining

from megatron.pipeline import patches
from megatron.pipeline.distributed.groups import new_group
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning.balance import Model
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.loads import Load
from megatron.pipeline.planner.schedule.core.names import STOCK
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved, v
from megatron.pipeline.planner.schedule.core.problem import Objective
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.lower.program import Posting
from megatron.pipeline.planner.schedule.lower.torch_csv import from_csv
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.planner.shape.stages import balanced_by_weight, balanced_layers
from megatron.pipeline.runtime.every_batch import EveryBatch
from megatron.pipeline.runtime.pipeline import Pipeline

# Where megatron-core and we run passes; W is a call of ours.
STEPS: tuple[Callable[..., Any], ...] = (schedules.forward_step, schedules.backward_step)


class Microbatch(NamedTuple):
    """The lengths of its sequences, and what they are to its passes."""

    lengths: Sequence[int]
    load: Load


@dataclass
class Contender:
    """A schedule in a runtime.

    Attributes:
        name: how it is called in the table.
        schedule: the passes that it runs, for the simulation.
        costs: what these take, with messages.
        iterate: runs this rank's part of one iteration.
        pipeline: that runs ours.
    """

    name: str
    schedule: Schedule
    costs: Costs
    iterate: Callable[[], object]
    pipeline: Pipeline | None = None

    def simulated(self, free: bool = False) -> Timeline:
        """When its passes should run; ``free``: messages take no time."""
        return simulate(self.schedule, replace(self.costs, hop=0.0) if free else self.costs)


class Megatron:
    """Iterations of sleeping stages in functions with the signature of megatron-core's schedules.

    One set of process groups serves all.

    Args:
        seconds: F, B and W of a rank's whole share, and one hop.

    Attributes:
        split: costs of the stages of a placement, where they are not equal shares; and what this split is called.
        expected: the costs that ours plans with, of those that a placement's stages have; the same by default.
    """

    split: tuple[Callable[[Placement], Costs], str] | None = None
    expected: Callable[[Costs, Placement], Costs] = staticmethod(lambda costs, _: costs)

    def __init__(self, seconds: Sequence[float], microbatches: int, sleeper: Sleeper) -> None:
        self.microbatches, self.sleeper, self._seconds = microbatches, sleeper, seconds
        self.ranks, self._rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        self._groups = ProcessGroupCollection()
        self._groups.tp = self._groups.cp = self._groups.dp_cp = new_group([self._rank])
        self._groups.embd = self._groups.pos_embd = None
        self._groups.pp = torch.distributed.group.WORLD

    def costs(self, placement: Placement) -> Costs:
        forward, backward, weight, hop = self._seconds
        if self.split:
            return replace(self.split[0](placement), hop=hop)
        return uniform(placement, forward, backward, weight, hop)

    def of_layers(self, model: Model, even: bool) -> Megatron:
        """The same with the layers of a model, which take a rank as long as its share on average: equally many on every stage, or
        balanced by what they take."""
        weights = [layer.total for layer in model.layers]
        faster = (sum(weights) + model.first.total + model.last.total) / self.ranks / sum(self._seconds[:3])

        def cut(placement: Placement) -> Costs:
            balanced = balanced_by_weight(weights, placement, model.extra(placement))
            costs = model.cut(balanced_layers(len(weights), placement, {}) if even else balanced)
            stages = ([each / faster for each in (one.forward, one.backward, one.weight)] for one in costs.stages)
            return Costs(tuple(StageCosts(*seconds) for seconds in stages))

        other = copy(self)
        other.split = cut, "even numbers" if even else "balanced"
        return other

    def stages(self, placement: Placement, costs: Costs, layers: int = 1) -> list[MegatronStage]:
        """This rank's chunks, of so few layers each."""
        chunks, config = placement.chunks, configuration(placement)
        return [
            MegatronStage(
                config, self.sleeper, costs.stages[stage], layers, chunk if chunks > 1 else None, stage == placement.last_stage
            )
            for chunk, stage in enumerate(placement.stages[self._rank])
        ]

    def contender(
        self,
        name: str,
        schedule: Schedule,
        forward_backward: Callable[..., Any],
        batches: Sequence[Sequence[Microbatch]],
        pipeline: Pipeline | None = None,
    ) -> Contender:
        """Args: batches: one for each iteration; microbatches are equal without."""
        costs = self.costs(schedule.placement)
        model = self.stages(schedule.placement, costs)
        data = [chain.from_iterable(batches) if batches else None for _ in model]

        def iterate() -> None:
            schedules.forward_step, schedules.backward_step = map(self.sleeper.step, STEPS)
            forward_backward(
                forward_step_func=forward_step,
                data_iterator=data,
                model=model,
                num_microbatches=self.microbatches,
                seq_length=1,
                micro_batch_size=1,
                p2p_communicator=P2PCommunicator(self._groups.pp, model[0].config),
                pg_collection=self._groups,
            )

        return Contender(f"{name}, {self.split[1]}" if self.split else name, schedule, costs, iterate, pipeline)

    def stock(self, chunks: int, batches: Sequence[Sequence[Microbatch]] = ()) -> Contender:
        """megatron-core's own schedule: 1F1B, or with two chunks interleaved."""
        family = "1f1b" if chunks == 1 else "interleaved"
        schedule = planning.plan(family, self.ranks, self.microbatches)  # the same order of the same passes
        run = schedules.get_forward_backward_func(self.ranks, chunks if chunks > 1 else None)
        return self.contender(f"{STOCK} {family}", schedule, run, batches)

    def ours(self, name: str, batches: Sequence[Sequence[Microbatch]] = (), every_batch: EveryBatch | None = None) -> Contender:
        """A schedule in our runtime, of the shortest makespan.

        Args:
            name: of a family, with ``@X`` behind it for room for X times the activations of 1F1B, and then ``/batched`` for
                messages that are started together.
            every_batch: how its order is planned for every batch.
        """
        wanted, _, posting = name.partition("/")
        family, _, memory = wanted.partition("@")
        placement = families.placement(family, self.ranks)
        costs = self.expected(self.costs(placement), placement)
        limit = float(memory) * self.ranks if memory else None
        goal = Objective.MAKESPAN
        # Every rank plans: a plan depends on nothing but its request.
        request = planning.Request(family, self.ranks, self.microbatches, costs, memory_limit=limit, objective=goal)
        pipeline = Pipeline(request, Posting(posting or "single"), every_batch=every_batch)
        schedule = pipeline.plans.plan(self.microbatches).schedule
        title = f"{name}, every batch" if every_batch else name
        return self.contender(title, schedule, pipeline.forward_backward, batches, pipeline)

    def torchs(self, name: str) -> Contender:
        """A schedule of torch.distributed.pipelining, in torch's own runtime."""
        if name == "1F1B":
            placement = interleaved(self.ranks, 1)
        else:
            placement = interleaved(self.ranks, 2) if name.startswith("Interleaved") else v(self.ranks)
        costs, count, mine = self.costs(placement), placement.last_stage + 1, placement.stages[self._rank]
        sleeping = {stage: TorchStage(self.sleeper, costs.stages[stage], stage == 0) for stage in mine}
        stages = [pipelining.PipelineStage(one, stage, count, torch.device("cpu")) for stage, one in sleeping.items()]
        for stage in stages:
            for method in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, method, self.sleeper.step(getattr(stage, method)))
        own = getattr(pipelining.schedules, f"Schedule{name}")
        schedule = own(stages[0] if len(stages) == 1 else stages, self.microbatches, loss_fn=lambda output, _: output.sum())
        data = torch.zeros(self.microbatches, 1, HIDDEN)
        inputs, target = [data] if 0 in mine else [], data if count - 1 in mine else None
        passes = planning.plan("1f1b", self.ranks, self.microbatches) if name == "1F1B" else _passes(schedule, f"torch {name}")
        return Contender(f"torch {name}", passes, costs, lambda: schedule.step(*inputs, target=target, return_outputs=False))

    def title(self, options: argparse.Namespace, *facts: str) -> str:
        """What was measured, above a table."""
        milliseconds = "/".join(f"{value:g}" for value in options.milliseconds)
        shared = [f"{self.ranks} ranks", f"{options.microbatches} microbatches", f"F/B/W = {milliseconds} ms", *facts]
        hop = 1e3 * self._seconds[-1]
        shared += [f"median of {options.rounds} rounds", f"hop {hop:.2f} ms", f"load {os.getloadavg()[0]:.1f}"]
        return ", ".join(shared)


def _passes(schedule: Any, name: str) -> Schedule:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "passes.csv"
        schedule._dump_csv(str(path), format="compute_only")
        return from_csv(path.read_text(), name)


def iteration(contender: Contender, sleeper: Sleeper) -> float:
    """Seconds from the first rank's first pass to the last rank's last pass."""
    sleeper.passes.clear()
    gc.collect()
    torch.distributed.barrier()
    gc.disable()  # as timeit does
    contender.iterate()
    sleeper.synchronize()
    gc.enable()
    ends = torch.tensor([sleeper.passes[0].start, -max(one.end for one in sleeper.passes)], dtype=torch.float64)
    torch.distributed.all_reduce(ends, op=torch.distributed.ReduceOp.MIN)
    return -(ends[0] + ends[1]).item()


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


def forward_step(data: Iterator[Microbatch] | None, stage: Any) -> tuple[Any, Callable[[torch.Tensor], Any]]:
    """What megatron-core and we call for a forward, on a microbatch of one token."""
    if data is not None:
        stage.load = next(data).load
    token = torch.zeros(1, 1, dtype=torch.int64)
    return stage(token, None, None, labels=token), _loss


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return output.sum(), {"loss": output.detach().sum()}


def start(options: argparse.Namespace) -> Megatron:
    """This rank's device, and megatron-core's schedules on it, in a world of all processes that torchrun has started."""
    patches.install()
    torch.set_num_threads(1)
    bind_to_core()
    torch.distributed.init_process_group("gloo")
    sleeper = Sleeper()
    seconds = [*(value / 1000 for value in options.milliseconds), _measure_hop(sleeper)]
    sleeper.precede_communication("send")
    return Megatron(seconds, options.microbatches, sleeper)


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
