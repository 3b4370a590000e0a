"""torch's own optimizers, which megatron-core takes where neither Transformer Engine nor apex is installed.

megatron-core expects that the state of an optimizer exists before a checkpoint is loaded or saved. torch's optimizers make theirs
in the first step. ``distrib_optimizer.py`` and ``trainer/optimizer_state.py`` call ``allocate_state`` first.
"""

from __future__ import annotations

from typing import Any

import torch

WITH_STEPS = (torch.optim.Adam, torch.optim.AdamW)  # their state counts steps
_OWN = (*WITH_STEPS, torch.optim.SGD)


def is_torch(optimizer: Any) -> bool:
    """Tell whether an optimizer is one of torch's, and not a fused one."""
    return type(optimizer) in _OWN


def allocate_state(optimizer: Any) -> None:
    """Make the state of an optimizer that has taken no step, before a checkpoint is loaded or saved.

    torch's optimizers make their state in ``step``. The step taken here changes no weight and is not counted.

    Args:
        optimizer: megatron-core's, and not a chain.
    """
    inner = optimizer.optimizer
    if not is_torch(inner):
        if inner is not None and optimizer.init_state_fn is not None:
            optimizer.init_state_fn(inner, optimizer.config)
        return
    optimizer.init_state_fn = lambda *_: None  # upstream has none for SGD, and the following code does its work for Adam
    if inner.state:
        return
    # Without a rate no weight changes. Without decay no state does: torch's SGD adds the decay to the gradient.
    given = [{name: group[name] for name in ("lr", "weight_decay")} for group in inner.param_groups]
    for group in inner.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    inner.step()
    inner.zero_grad(set_to_none=True)
    for group, values in zip(inner.param_groups, given, strict=True):
        group.update(values)
    for state in inner.state.values():
        if "step" in state:
            state["step"].zero_()
