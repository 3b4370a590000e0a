"""As reinforcement learning does: log-probabilities of one number of microbatches, then training on another, in every iteration.

torchrun --nproc-per-node 2 examples/varying_microbatches.py zb-v
"""

import sys

import torch
from own_training_loop import batches, build, forward_step, plan, run, step

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer


def log_probabilities(data, model):
    """Instead of a loss: those of every token, kept for the end."""
    return forward_step(data, model, lambda losses: (losses.mean(), -losses.detach().clone()))


def train(schedule, iterations=3):
    """For every iteration: the log-probabilities of all sequences and the losses, on the rank that has the last stage."""
    pipeline = plan(schedule)
    chunks = build(pipeline)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), chunks)
    found = []
    for iteration in range(iterations):
        rollouts = batches(3 + 2 * iteration, seed=iteration)  # each number is planned when it first comes: no padding
        with torch.no_grad():
            before = run(pipeline, chunks, rollouts, forward_only=True, step=log_probabilities)
        losses, _ = step(pipeline, chunks, optimizer, rollouts[: 2 + iteration])
        found.append((before, losses))
    return found


if __name__ == "__main__":
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    for before, losses in train(sys.argv[1] if len(sys.argv) > 1 else "zb-v"):
        if losses:
            mean = torch.stack(before).mean()
            print(f"{len(before)} microbatches, log-probability {mean:.4f}; trained on {len(losses)}, loss {losses[0]:.4f}")
