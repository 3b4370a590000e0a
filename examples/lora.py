"""Low-rank adapters on frozen weights: the W passes of frozen weights are empty, and the planner is given that.

torchrun --nproc-per-node 2 examples/lora.py zb-h1
"""

import sys

import torch
from own_training_loop import batches, build, plan, step

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

RANK = 4


class Adapted(torch.nn.Module):
    """A frozen linear and two small matrices beside it, whose gradients autograd computes in B."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        outputs, inputs = linear.weight.shape
        self.down = torch.nn.Parameter(torch.randn(RANK, inputs) / inputs)
        self.up = torch.nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, hidden):
        output, bias = self.linear(hidden)
        return output + hidden @ self.down.T @ self.up.T, bias


def adapt(model):
    """Freeze a chunk, and put an adapter beside each linear of its layers; without tensor parallelism."""
    model.requires_grad_(False)
    for module in list(model.decoder.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
                setattr(module, name, Adapted(child))


def train(schedule, iterations=10):
    """Losses where they are known, the names of what trained, and the largest change of a frozen weight."""
    pipeline = plan(schedule)
    chunks = build(pipeline, adapt)
    frozen = [(weight, weight.clone()) for chunk in chunks for weight in chunk.parameters() if not weight.requires_grad]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), chunks)
    losses = [step(pipeline, chunks, optimizer, batches(4, seed=0))[0] for _ in range(iterations)]
    trained = [name for chunk in chunks for name, weight in chunk.named_parameters() if weight.requires_grad]
    return losses, trained, max(float((weight - before).abs().max()) for weight, before in frozen)


if __name__ == "__main__":
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    losses, trained, _ = train(sys.argv[1] if len(sys.argv) > 1 else "zb-h1")
    if losses[0]:
        print(f"{len(trained)} matrices on this rank; loss {losses[0][0]:.4f} -> {losses[-1][0]:.4f}")
