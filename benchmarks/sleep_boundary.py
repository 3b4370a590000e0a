"""The time from one iteration to the next, with reductions, steps and gathers, under Megatron-LM's rules and under ours.

    torchrun --nproc-per-node 4 benchmarks/sleep_boundary.py --microbatches 8 --reduce 80 --gather 80

Layers sleep (sleep_stages.py); around them are megatron-core's own DDP, with a bucket for each layer, and its distributed
optimizer. Reductions and gathers sleep one after another on a lane of their own, each begun where DDP begins it; a step sleeps on
the device, and every rank waits for the norm of all gradients. Megatron-LM's schedules train with its flags
``--overlap-grad-reduce`` and ``--overlap-param-gather``, whose defaults align both over pipeline ranks, and without aligning;
ours by ``megatron.pipeline.install``, with plans that count all of it. Measured is the time from one iteration's first pass on
rank 0 to the next one's; the simulation and its bound have RS behind the last pass of a chunk, and DDP begins them within it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from common import add_flags, command_line, in_rounds, print_table
from contenders import STEPS, Megatron, forward_step, start
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import schedules
from sleeping import HIDDEN, Sleeper

from megatron.pipeline import install
from megatron.pipeline.backward import weight_tasks
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, uniform
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved
from megatron.pipeline.planner.schedule.core.problem import Objective
from megatron.pipeline.planner.schedule.optimum.period import period_bound
from megatron.pipeline.planner.schedule.transforms.boundary import Rules
from megatron.pipeline.planner.schedule.transforms.boundary import megatron as by_megatron

LAYERS = 4  # of a chunk, and so its buckets
STOCK = {
    "1f1b": (1, True),
    "1f1b, not aligned": (1, False),
    "interleaved": (2, True),
    "interleaved, not aligned": (2, False),
}


class UnderWay:
    """A reduction or a gather that has begun."""

    def __init__(self, sleeper: Sleeper, end: float) -> None:
        self._sleeper, self._end = sleeper, end

    def wait(self) -> None:
        """As with NCCL, the device waits and the host does not."""
        self._sleeper.wait(self._end)


class Lane:
    """What a rank does with other replicas, one thing after another, while its device computes."""

    def __init__(self, sleeper: Sleeper) -> None:
        self._sleeper, self._free = sleeper, 0.0

    def start(self, seconds: float) -> UnderWay:
        """Begin behind the passes so far."""
        self._free = max(self._free, self._sleeper.free) + seconds
        return UnderWay(self._sleeper, self._free)

    def takes(self, method: str, handle: str, seconds: float) -> None:
        """Have a method of DDP's groups of buckets, which leaves a handle, take seconds for all buckets of a rank together."""
        start: Callable[..., Any] = getattr(Group, method)

        def start_on_lane(group: Any, *args: Any, **options: Any) -> None:
            under_way = getattr(group, handle)
            start(group, *args, **options)
            if under_way is None:  # else DDP starts nothing, as where it has yet to learn when gradients are complete
                setattr(group, handle, self.start(seconds * group.share))

        setattr(Group, method, start_on_lane)


def costs_of(options: Any, placement: Placement) -> Costs:
    """Of sleeping passes, and of what is between iterations, in seconds."""
    costs = uniform(placement, *(value / 1000 for value in options.milliseconds))
    between = {name: getattr(options, name) / 1000 / placement.chunks for name in ("reduce", "step", "gather")}
    return replace(costs, stages=tuple(replace(stage, **between) for stage in costs.stages))


class Training:
    """Iterations of one schedule on this rank, with their steps."""

    def __init__(self, name: str, options: Any, megatron: Megatron) -> None:
        ranks, (chunks, aligned), stock = megatron.ranks, STOCK.get(name, (0, True)), name in STOCK
        self._microbatches, self._sleeper = options.microbatches, megatron.sleeper
        if stock:
            self._loop = loop = install("stock")
            placement: Placement = interleaved(ranks, chunks)
            costs, family = costs_of(options, placement), name.partition(",")[0]
            plan = planning.Request(family, ranks, options.microbatches, costs).plan()
            made, steady = by_megatron(plan.schedule, plan.problem, [Rules(aligned=aligned)])
            self.simulated, self.bound = steady.period, period_bound(made, plan.problem)
        else:
            placement = families.placement(name, ranks)
            costs = costs_of(options, placement)
            self._loop = loop = install(planning.Request(name, ranks, 1, costs, objective=Objective.MAKESPAN))
            plan = loop.pipeline(ranks).plans.plan(options.microbatches)
            assert plan.period is not None, "the costs say what ranks do between iterations"
            self.simulated, self.bound = plan.period, plan.period_bound
        chunks, self.model = placement.chunks, []
        settings = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            align_param_gather=aligned,
            use_distributed_optimizer=True,
            bucket_size=HIDDEN,
            delay_wgrad_compute=True,
        )
        for chunk, stage in enumerate(megatron.stages(placement, costs, LAYERS)):
            if stock:
                for weight in stage.parameters():
                    weight_tasks.prepare(weight)
            # As Megatron-LM has it: chunks but the first are gathered in one bucket.
            self.model.append(DistributedDataParallel(stage.config, settings, stage, disable_bucketing=chunk > 0))
            for group in self.model[-1].bucket_groups:
                group.share = len(group.params) / LAYERS / chunks
        adam = OptimizerConfig(lr=0.0, optimizer="adam", use_distributed_optimizer=True, overlap_param_gather=True, clip_grad=1.0)
        self._optimizer = get_megatron_optimizer(adam, self.model)
        self._step_sleeps(options.step / 1000)
        config = self.model[0].config
        config.finalize_model_grads_func = _finalize
        config.no_sync_func = [one.no_sync for one in self.model] if chunks > 1 else self.model[0].no_sync
        if aligned and stock:
            starts = [one.start_grad_sync for one in self.model], [one.start_param_sync for one in self.model]
            config.grad_sync_func, config.param_sync_func = starts if chunks > 1 else (starts[0][0], starts[1][0])
        own = schedules.get_forward_backward_func(ranks, chunks if chunks > 1 else None) if stock else None
        self._forward_backward = own or loop.forward_backward

    def _step_sleeps(self, seconds: float) -> None:
        """Have a step of all of this rank's weights take seconds."""
        for part in self._optimizer.chained_optimizers:
            inner, step, count = part.optimizer, part.optimizer.step, sum(len(group["params"]) for group in part.param_groups)

            def sleep(
                *args: Any, inner: Any = inner, step: Callable[..., Any] = step, each: float = seconds / max(count, 1)
            ) -> None:
                self._sleeper.occupy(each * sum(len(group["params"]) for group in inner.param_groups))
                step(*args)

            inner.step = sleep

    def run(self, iterations: int) -> list[float]:
        """Seconds from this rank's first pass to that of the next iteration, of each but the first."""
        schedules.forward_step, schedules.backward_step = map(self._sleeper.step, STEPS)
        self._loop.install()  # in place of another one's
        self._sleeper.passes.clear()
        torch.distributed.barrier()
        firsts = []
        for _ in range(iterations + 2):
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            firsts.append(len(self._sleeper.passes))
            self._forward_backward(
                forward_step_func=forward_step,
                data_iterator=[None] * len(self.model) if len(self.model) > 1 else None,
                model=self.model if len(self.model) > 1 else self.model[0],
                num_microbatches=self._microbatches,
                seq_length=1,
                micro_batch_size=1,
            )
            self._optimizer.step()
        begins = [self._sleeper.passes[first].start for first in firsts]
        return [end - start for start, end in pairwise(begins[1:])]


def _finalize(model: list[DistributedDataParallel], *_: Any, **__: Any) -> None:
    for chunk in model:
        chunk.finish_grad_sync()


def main() -> None:
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--ours", nargs="*", default=["zb-h1", "zb-v", "v-half"], metavar="NAME")
    add("--stock", nargs="*", default=list(STOCK), choices=list(STOCK), metavar="NAME")
    add_flags(add)
    add("--reduce", type=float, default=40, help="milliseconds of a rank's reductions, of all its buckets")
    add("--step", type=float, default=20, help="milliseconds of its step")
    add("--gather", type=float, default=40, help="milliseconds of its gathers")
    options = parser.parse_args()
    megatron = start(options)
    ranks, sleeper = megatron.ranks, megatron.sleeper
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
    sleeper.precede_communication("allreduce")
    trainings = {name: Training(name, options, megatron) for name in (*options.stock, *options.ours)}
    lane = Lane(sleeper)
    lane.takes("start_grad_sync", "grad_reduce_handle", options.reduce / 1000)
    lane.takes("start_param_sync", "param_gather_handle", options.gather / 1000)
    found = in_rounds({name: partial(one.run, 4) for name, one in trainings.items()}, options.rounds)
    if torch.distributed.get_rank() == 0:
        seconds = {name: [statistics.median(periods) for periods in rounds] for name, rounds in found.items()}
        first = next(iter(seconds.values()))
        rows = []
        for name, each in seconds.items():
            measured, training = statistics.median(each), trainings[name]
            ratios = (measured / training.simulated, measured / training.bound, statistics.median(first) / measured)
            times = (measured, training.simulated)
            rows.append((name, *(f"{1000 * time:.0f}" for time in times), *(f"{ratio:.3f}" for ratio in ratios)))
        between = "/".join(f"{getattr(options, name):g}" for name in ("reduce", "step", "gather"))
        title = f"{ranks} ranks, {options.microbatches} microbatches, RS/OPT/AG = {between} ms, load {os.getloadavg()[0]:.1f}"
        heads = ("period ms", "simulated ms", "measured / simulated", "measured / bound", f"speed-up over {next(iter(seconds))}")
        print_table(title, ("schedule", *heads), rows)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
