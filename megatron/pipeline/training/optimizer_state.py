"""The state of torch's own optimizers, which upstream's checkpoints only half support.

Upstream expects the fused optimizers of Transformer Engine or apex, which it looks after. Where neither is installed it
falls back to torch's, whose state appears in the first step only. For the distributed optimizer see
patches/distrib_optimizer.py.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.pipeline.optimizer.step_ahead import parts_of

_TORCH_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Make the state that a checkpoint is loaded into, by a step that changes nothing."""
    for one in parts_of(optimizer):
        inner = one.optimizer
        if not is_torch(inner):
            continue
        one.init_state_fn = lambda *_: None  # upstream has none for SGD, and what follows does its work for Adam
        rates = [group["lr"] for group in inner.param_groups]
        for group in inner.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        inner.step()
        inner.zero_grad(set_to_none=True)
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate


def is_torch(optimizer: Any) -> bool:
    """Whether it is one of torch's optimizers, and not a fused one."""
    return type(optimizer) in _TORCH_OPTIMIZERS
