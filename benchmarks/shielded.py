"""What collectives of tensor parallelism cost a split backward, with and without weight gradients behind them.

    python benchmarks/shielded.py

Predicted seconds of B and W over those of BW, and plans of Llama 3 70B, at costs that ``mpipe costs`` predicts for H100s. Then
measured: a stage of two linears by columns and two by rows that sleep, whose collectives run on a lane of their own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from common import command_line, in_rounds, markdown

from megatron.pipeline.backward.weight_tasks import WeightTask, deferring, submit
from megatron.pipeline.costmodel import device, estimate
from megatron.pipeline.costmodel.links import Links
from megatron.pipeline.planning.request import Request
from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.placement import Placement, linear
from megatron.pipeline.shape.activation_policy import ActivationPolicy
from megatron.pipeline.shape.gpt import Shape

# Layers, hidden size, heads, heads of keys and values, width of the MLP, vocabulary: their published config.json files.
LLAMA = {
    "8B": (32, 4096, 32, 8, 14336, 128256),
    "70B": (80, 8192, 64, 8, 28672, 128256),
    "405B": (126, 16384, 128, 8, 53248, 128256),
}
TOKENS, RANKS = 8192, 8


def costs(model: str, tensor: int, placement: Placement, hides: bool = True) -> Costs:
    """Of equal stages without the ends of the model; ``hides``: whether they say what B can compute behind its collectives."""
    layers, hidden, heads, groups, ffn, vocabulary = LLAMA[model]
    policy = ActivationPolicy(tensor=tensor, sequence_parallel=True, fused_norms=True, hidden_masks=False)
    shape = Shape(layers, hidden, heads, groups, hidden // heads, ffn, True, TOKENS, 1, vocabulary, policy=policy)
    gpu = device.named("H100-80GB")
    found = estimate.estimate(shape, placement, [layers // placement.depth] * placement.depth, gpu, links=Links.within(gpu))
    stage = found.stages[1]
    stages = (stage if hides else replace(stage, behind=None, saved=None),) * placement.depth
    return replace(found, stages=stages)


def predicted() -> None:
    rows = []
    for model in LLAMA:
        for tensor in (2, 4, 8):
            stage = costs(model, tensor, linear(RANKS)).stages[0]
            whole, layers = stage.value("fused"), LLAMA[model][0] // RANKS
            taken = [one.backward + one.weight for one in (stage, stage.shielded())]
            over, longer = ([f"{each / whole:.3f}" for each in taken], [f"{1e3 * (each - whole) / layers:.2f}" for each in taken])
            rows.append((f"{model}, TP {tensor}", *over, *longer))
    print(markdown(("B + W over BW", "split", "shielded", "ms a layer, split", "shielded"), rows))


def planned() -> None:
    rows = []
    for name, chunks in (
        ("interleaved", 2),
        ("interleaved", 5),
        ("zb-h1", None),
        ("zb-h2", None),
        ("zb-v", None),
        ("v-half", None),
    ):
        row = [f"{name}{f', {chunks} chunks' if chunks else ''}"]
        for microbatches in (16, 64):
            request = Request(name, RANKS, microbatches, chunks=chunks, objective="makespan")
            for hides in (False, True):
                plan = replace(request, costs=partial(costs, "70B", 8, hides=hides)).plan()
                row.append(f"{plan.value:.3f} s")
            row.append(f"{len(plan.schedule.shielded)} of {plan.schedule.placement.depth}")
        rows.append(row)
    heads = [f"m = {m}: {what}" for m in (16, 64) for what in ("split", "chosen", "shielded stages")]
    print(markdown(("Llama 3 70B, TP 8, PP 8", *heads), rows))


@dataclass
class Sleep:
    """A weight gradient."""

    seconds: float
    held: tuple[()] = ()

    def prefetch(self) -> None: ...

    def run(self) -> None:
        time.sleep(self.seconds)


class Linear(torch.autograd.Function):
    """A linear that sleeps; by columns, it waits for a collective that begins behind its input's gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: tuple[float, float, float], columns: bool) -> torch.Tensor:
        ctx.seconds, ctx.columns = seconds, columns
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        backward, weight, collective = ctx.seconds
        time.sleep(backward)
        over = time.perf_counter() + collective
        submit(Sleep(weight), row=not ctx.columns, reduces=ctx.columns)
        if ctx.columns:
            time.sleep(max(0.0, over - time.perf_counter()))
        return gradient, None, None


def measured(args: argparse.Namespace) -> None:
    backward, weight, collective = (milliseconds / 1e3 for milliseconds in args.milliseconds)
    each = backward / 4, weight / 4, collective

    def run(split: bool, shielded: bool = False) -> float:
        hidden = torch.zeros(1, requires_grad=True)
        for columns in (True, False) * 2:
            hidden = Linear.apply(hidden, each, columns)
        tasks: list[WeightTask] = []
        began = time.perf_counter()
        if split:
            with deferring(tasks, shielded):
                hidden.backward()
        else:
            hidden.backward()
        for task in tasks:
            task.run()
        return time.perf_counter() - began

    ways: dict[str, Callable[[], float]] = {
        "BW": partial(run, False),
        "B and W": partial(run, True),
        "B and W, shielded": partial(run, True, True),
    }
    found = {name: statistics.median(rounds) for name, rounds in in_rounds(ways, args.rounds).items()}
    rows = [(name, f"{1e3 * seconds:.1f}", f"{seconds / found['BW']:.3f}") for name, seconds in found.items()]
    print(markdown(("measured", "ms", "over BW"), rows))


def main() -> None:
    parser = command_line(__doc__)
    add = parser.add_argument
    add(
        "--milliseconds", nargs=3, type=float, default=(40, 40, 4), metavar=("B", "W", "COLLECTIVE"), help="of the stage; of each"
    )
    add("--rounds", type=int, default=25)
    args = parser.parse_args()
    predicted()
    planned()
    measured(args)


if __name__ == "__main__":
    main()
