"""Low-rank adapters beside frozen linears: W passes have only their gradients, and are planned so.

    torchrun --nproc-per-node 2 examples/lora.py zb-v costs.json

A frozen linear leaves nothing to W, but a plan for equal costs, the default, expects a W as long as B. So this measures
5 iterations, goes on under the schedule for their costs, and writes these into a file, for ``mpipe plan --costs FILE`` and for
``--pipeline-costs FILE``.

With hidden size 512 and sequences of 256 tokens, W took 15 % of B's time; with all weights training 77 % (zb-v, 2 CPU cores,
2026-11-23). At F = B = 1 and W = 0.15 that makes v-half 16 % shorter (54.2 -> 45.5: 4 ranks, 8 microbatches, hop 0.1, simulated);
zb-h1 and zb-v stay as they are. W still needs the input of every adapted linear. Make ``down`` and ``up`` plain parameters, and B
computes their gradients: W passes are then empty, and B frees all activations.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from own_training_loop import build, plan, run, wrap
from random_tokens import batches, draw, start

from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.profiling import profiled
from megatron.pipeline.schedule.core.costs import Costs

RANK = 4


class Adapted(torch.nn.Module):
    """A frozen linear with two narrow ones beside it, ``up @ down``. Without tensor parallelism."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        options = {"config": linear.config, "bias": False, "init_method": linear.config.init_method}
        self.linear = linear
        self.down = ColumnParallelLinear(inputs, RANK, **options)
        self.up = ColumnParallelLinear(RANK, outputs, **(options | {"init_method": torch.nn.init.zeros_}))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """megatron-core's linears return their bias beside the output."""
        output, bias = self.linear(hidden)
        return output + self.up(self.down(hidden)[0])[0], bias


def adapt(models: list[Any]) -> None:
    """Freeze the chunks, and put an adapter beside every linear of their layers; before their backwards are split."""
    for model in models:
        model.requires_grad_(False)
        for module in list(model.decoder.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
                    setattr(module, name, Adapted(child))
    draw(models)


def plan_again(pipeline: Pipeline, iterate: Callable[[], Any]) -> Costs:
    """Measure some iterations, and swap in the schedule for what they cost. The ranks agree on costs, and so on the plan."""
    steps = profiled(pipeline)
    next(steps)
    try:
        while True:
            iterate()
            report = pipeline.report()
            assert report is not None, "a pipeline with measure=True has one after every training iteration"
            steps.send(report)
    except StopIteration as done:
        costs: Costs = done.value.costs
    pipeline.plans.adopt(costs, None, pipeline.plans.plan_again(costs, None))
    return costs


def main(schedule: str, file: str) -> None:
    """Train on one batch, and write the costs."""
    pipeline = plan(schedule, measure=True)
    models = build(pipeline)
    adapt(models)
    chunks = wrap(pipeline, models)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), chunks)
    costs = plan_again(pipeline, lambda: run(chunks, batches(4, seed=0), optimizer))
    losses, _ = run(chunks, batches(4, seed=0), optimizer)
    if losses:  # on the rank that has the last stage
        backward, weight = (sum(getattr(stage, part) for stage in costs.stages) for part in ("backward", "weight"))
        print(f"loss {torch.stack(losses).mean():.4f}; W takes {weight / backward:.0%} of B")
        Path(file).write_text(costs.to_json(), encoding="utf-8")


if __name__ == "__main__":
    start()
    main(*sys.argv[1:])
