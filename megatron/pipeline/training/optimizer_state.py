"""Loading the state of torch's own optimizers, which upstream's checkpoints only half support.

Upstream expects the fused optimizers of Transformer Engine or apex, which it looks after. Where neither is installed it
falls back to torch's, whose state appears in the first step only and holds the number of steps for every parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.pipeline.optimizer.step_ahead import parts_of

_TORCH_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Make the state that a checkpoint is loaded into, by a step that changes nothing."""
    for one in parts_of(optimizer):
        inner = one.optimizer
        if not _is_torch(inner):
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


def load_state(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """``optimizer.load_state_dict(state)``, in two parts for a distributed optimizer around one of torch's.

    Upstream would look for the number of steps among the tensors of every parameter, where no checkpoint has it: it comes
    with the rest, and is set aside while the tensors are loaded. Upstream also gives all parameters one and the same
    counter, which would count every parameter's update as a step.
    """
    parts = parts_of(optimizer)
    if not all(isinstance(one, DistributedOptimizer) and _is_torch(one.optimizer) for one in parts):
        optimizer.load_state_dict(state)
        return
    # Experts have an optimizer of their own: then the state is by number.
    states = [state] if len(parts) == 1 else [one for _, one in sorted(state.items())]
    for one, own in zip(parts, states, strict=True):
        _load_distributed(one, own)


def _load_distributed(optimizer: DistributedOptimizer, state: dict[Any, Any]) -> None:
    tensors = state.pop("param_state")
    optimizer.load_state_dict(state)
    states = optimizer.optimizer.state.values()
    steps = [one.pop("step") for one in states]
    optimizer.load_parameter_state_from_fully_reshardable(tensors)
    for one, step in zip(states, steps, strict=True):
        one["step"] = step.clone()


def _is_torch(optimizer: Any) -> bool:
    return type(optimizer) in _TORCH_OPTIMIZERS
