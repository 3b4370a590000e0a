"""As reinforcement learning does: log-probabilities of some microbatches, then training on fewer; other numbers each time.

torchrun --nproc-per-node 2 examples/varying_microbatches.py zb-v
"""

import sys
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from own_training_loop import build, plan, run, wrap
from random_tokens import batches, start

SHARDED = {"use_distributed_optimizer": True, "overlap_param_gather": True}


def iterate(
    chunks: list[Any], optimizer: Any, rollouts: list[torch.Tensor], trained: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probabilities by token of every rollout, and the losses of those that are trained on, on the last stage's rank.

    The schedule of a number of microbatches is planned when that number first comes: nothing is padded.
    """
    losses, _ = run(chunks, rollouts)  # forwards alone; a loss is minus a log-probability
    best = sorted(rollouts, key=lambda tokens: float(tokens.sum()))[:trained]  # a stand-in for rewards
    return [-loss for loss in losses], run(chunks, best, optimizer)[0]


if __name__ == "__main__":
    start()
    pipeline = plan(sys.argv[1])
    chunks = wrap(build(), overlap_grad_reduce=True, **SHARDED)
    if pipeline.is_stock:  # schedules of this package ask DDP themselves
        chunks[0].config.no_sync_func = chunks[0].no_sync
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, **SHARDED), chunks)
    for rollouts, trained in [(3, 2), (7, 5), (4, 1)]:
        scored, losses = iterate(chunks, optimizer, batches(rollouts, seed=rollouts), trained)
        if parallel_state.is_pipeline_last_stage():
            print(f"log-probability {torch.stack(scored).mean():.4f} of {len(scored)} microbatches, {len(losses)} trained on")
