"""How close does a measured iteration come to the simulated one? Stages that sleep instead of compute tell.

Run it with as many processes as pipeline ranks; sleeping needs no cores, so 2 are enough for 4 ranks:

    torchrun --nproc-per-node 4 benchmarks/sleep_stages.py --microbatches 8 --milliseconds 40 40 40

Every round runs one iteration of each schedule, megatron-core's own 1F1B among them, so that whatever disturbs the
machine disturbs all of them. Reported are medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.pipeline.patches import schedules
from rich.console import Console
from rich.table import Table

from megatron.pipeline import patches
from megatron.pipeline.model.weight_tasks import submit
from megatron.pipeline.runtime.pipeline import STOCK, Pipeline
from megatron.pipeline.schedule.costs import uniform
from megatron.pipeline.schedule.simulate import simulate

HIDDEN = 64
COMPUTING = 0.0003  # seconds at the end of a pass that are not slept


class SleepingStage(torch.nn.Module):
    """A model stage whose F, B and W sleep."""

    model_type = ModelType.encoder_or_decoder
    vp_stage = None

    def __init__(self, config: TransformerConfig, seconds: tuple[float, float, float]) -> None:
        super().__init__()
        self.config = config
        self.seconds = seconds
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        self.received = tensors[0]

    def forward(self) -> torch.Tensor:
        end = time.perf_counter() + self.seconds[0]
        received = self.received if self.received is not None else self.weight.expand(1, 1, HIDDEN)
        output: torch.Tensor = _Sleep.apply(received, self.seconds)
        if parallel_state.is_pipeline_last_stage():
            output = output.sum()
        occupy_until(end)
        return output


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, seconds: tuple[float, float, float]) -> torch.Tensor:
        ctx.seconds = seconds
        return received.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        end = time.perf_counter() + ctx.seconds[1]
        input_gradient = gradient.clone()
        occupy_until(end)
        submit(_SleepingWeight(ctx.seconds[2]))
        return input_gradient, None


class _SleepingWeight:
    held = ()

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def prefetch(self) -> None:
        """A sleeping weight needs no communication."""

    def run(self) -> None:
        occupy_until(time.perf_counter() + self._seconds)


def occupy_until(end: float) -> None:
    """Keep the stage busy until a time of ``time.perf_counter``: asleep, and for the last moment computing.

    A process that wakes up finds its caches cold, and torch's first calls take ten times as long as usual; a stage that
    computes leaves them warm.
    """
    time.sleep(max(0.0, end - time.perf_counter() - COMPUTING))
    small = torch.ones(1, 1, HIDDEN)
    while time.perf_counter() < end:
        small = small.clone()


def forward_step(_: Any, model: SleepingStage) -> tuple[torch.Tensor, Any]:
    return model(), lambda output: (output, {"loss": output.detach()})


def iteration(model: SleepingStage, microbatches: int) -> float:
    """Seconds from the first rank's start to the last rank's end of one iteration."""
    torch.distributed.barrier()
    start = time.monotonic()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=model,
        num_microbatches=microbatches,
        seq_length=1,
        micro_batch_size=1,
    )
    interval = torch.tensor([start, -time.monotonic()], dtype=torch.float64)
    torch.distributed.all_reduce(interval, op=torch.distributed.ReduceOp.MIN)
    return -(interval[0] + interval[1]).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=[STOCK, "1f1b", "zb-h1", "zb-h2"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", nargs=3, type=float, default=(40, 40, 40), metavar=("F", "B", "W"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    patches.install()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    ranks = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(1, ranks)
    config = TransformerConfig(
        num_layers=ranks,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=ranks,
        pipeline_dtype=torch.float32,
        batch_p2p_sync=False,
        deallocate_pipeline_outputs=True,
    )
    forward, backward, weight = (value / 1000 for value in options.milliseconds)
    model = SleepingStage(config, (forward, backward, weight))
    pipelines = {name: Pipeline(name, ranks) for name in options.schedules}

    seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    for turn in range(options.rounds + 1):
        for name, pipeline in pipelines.items():
            schedules.restore()
            pipeline.install()
            measured = iteration(model, options.microbatches)
            if turn > 0:  # the first round connects the ranks
                seconds[name].append(measured)

    if torch.distributed.get_rank() == 0:
        _print(pipelines, seconds, partial(uniform, forward=forward, backward=backward, weight=weight), options)
    torch.distributed.destroy_process_group()


def _print(pipelines: dict[str, Pipeline], seconds: dict[str, list[float]], costs: Any, options: argparse.Namespace) -> None:
    ranks = torch.distributed.get_world_size()
    table = Table(
        title=f"{ranks} ranks, {options.microbatches} microbatches, F/B/W = {'/'.join(map(str, options.milliseconds))} ms, "
        f"median of {options.rounds} rounds"
    )
    for column in ("schedule", "measured ms", "simulated ms", "measured / simulated", "speed-up over stock"):
        table.add_column(column, justify="right" if column != "schedule" else "left")
    stock = statistics.median(seconds[STOCK]) if STOCK in seconds else None
    for name, pipeline in pipelines.items():
        measured = statistics.median(seconds[name])
        planned = Pipeline("1f1b", ranks) if pipeline.is_stock else pipeline  # stock is 1F1B
        simulated = simulate(planned.plan(options.microbatches).schedule, costs(planned.placement)).makespan
        table.add_row(
            name,
            f"{1000 * measured:.1f}",
            f"{1000 * simulated:.1f}",
            f"{measured / simulated:.4f}",
            f"{stock / measured:.3f}" if stock else "",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
