"""Low-rank adapters beside frozen linears: W passes have only their gradients, and are planned so.

    torchrun --nproc-per-node 2 examples/lora.py v-half

A frozen linear leaves nothing to W. ``install`` counts which share of every stage's weights trains, and plans with a W as short.
At F = B = 1 and W = 0.15, as measured with hidden size 512 and sequences of 256 tokens (zb-v, 2 CPU cores, 2026-11-23), v-half
becomes 16 % shorter (54.2 -> 45.5: 4 ranks, 8 microbatches, hop 0.1, simulated); zb-h1 and zb-v stay as they are. W still needs
the input of every adapted linear. Make ``down`` and ``up`` plain parameters, and B computes their gradients: W passes are then
empty, and B frees all activations.
"""

import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from own_training_loop import build, plan, run, wrap
from random_tokens import batches, draw, start

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


def main(schedule: str) -> None:
    """Train on one batch."""
    pipeline = plan(schedule)
    models = build()
    adapt(models)
    chunks = wrap(models)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), chunks)
    for _ in range(5):
        losses, _ = run(chunks, batches(4, seed=0), optimizer)
    if parallel_state.is_pipeline_last_stage():
        planned = [stage.weight / stage.backward for stage in pipeline.plans.planned_costs.stages]
        print(f"loss {torch.stack(losses).mean():.4f}; W is planned to take {max(planned):.0%} of B")


if __name__ == "__main__":
    start()
    main(*sys.argv[1:])
