"""The state of optimizers in checkpoints: what kind it is, and that of torch's own, which upstream only half supports.

Upstream expects the fused optimizers of Transformer Engine or apex, which it looks after. Where neither is installed it
falls back to torch's, whose state appears in the first step only. For the distributed optimizer see
patches/distrib_optimizer.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer

from megatron.pipeline.optimizer.step_ahead import parts_of

_WITH_STEPS = (torch.optim.Adam, torch.optim.AdamW)
_TORCH_OPTIMIZERS = (*_WITH_STEPS, torch.optim.SGD)
_OPTIMIZER, _DISTRIBUTED, _SIXTEEN_BITS = "--optimizer", "--use-distributed-optimizer", "--bf16 or --fp16"


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Make the state of an optimizer that has taken no step, for a checkpoint to be loaded into, or to be saved.

    Torch's optimizers make it in a step; this one changes nothing and is not counted.
    """
    for one in parts_of(optimizer):
        inner = one.optimizer
        if not is_torch(inner):
            if inner is not None and one.init_state_fn is not None:
                one.init_state_fn(inner, one.config)
            continue
        one.init_state_fn = lambda *_: None  # upstream has none for SGD, and what follows does its work for Adam
        if inner.state:
            continue
        # Neither the rate may change a weight, nor the decay a state: torch's SGD adds it to the gradient.
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


def sharded_state(optimizer: MegatronOptimizer, model: dict[str, Any], is_loading: bool, metadata: dict[str, Any]) -> Any:
    """``optimizer.sharded_state_dict``, with the number of steps also where that is 0, which upstream leaves out."""
    state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    for one, own in zip(parts_of(optimizer), _by_part(state), strict=True):
        inner = own.get("optimizer", own)
        if "state" in inner and type(one.optimizer) in _WITH_STEPS:
            inner["state"].setdefault("common_step", torch.tensor(0.0))
    return state


def load_state(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """``optimizer.load_state_dict(state)``, where a state with a constant loss scale also goes on with a dynamic one."""
    for own in _by_part(state):
        if not own.get("grad_scaler", True):
            del own["grad_scaler"]  # of a constant scale; a dynamic one starts with its initial value
    optimizer.load_state_dict(state)


def kind_of_state(state: dict[Any, Any]) -> dict[str, Any]:
    """What decides which optimizers can go on with a state, by flag.

    Args:
        state: of the optimizer, as it is in a checkpoint's ``common.pt``.
    """
    first = _by_part(state)[0]
    distributed = "param_state_sharding_type" in first
    group = first.get("optimizer", first)["param_groups"][0]
    if "betas" in group:
        beta1, beta2 = group["betas"]
        kind = {_OPTIMIZER: "adam", "--adam-beta1": beta1, "--adam-beta2": beta2, "--adam-eps": group["eps"]}
    else:
        kind = {_OPTIMIZER: "sgd", "--sgd-momentum": group["momentum"]}
    # A distributed optimizer keeps float32 weights of any model; without one those of 16 bits have another state.
    return {_DISTRIBUTED: distributed} | ({} if distributed else {_SIXTEEN_BITS: "optimizer" in first}) | kind


def wanted_kind(args: Namespace) -> dict[str, Any]:
    """The flags that ``kind_of_state`` has."""
    names = ("optimizer", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "use_distributed_optimizer")
    flags = {"--" + name.replace("_", "-"): getattr(args, name) for name in names}
    return flags | {_SIXTEEN_BITS: args.bf16 or args.fp16}


def has_state(args: Namespace, tensors: Iterable[str]) -> bool:
    """Whether a checkpoint of these tensors has what the optimizer keeps of every parameter: not before its first step, once."""
    kept = "exp_avg" if args.optimizer == "adam" else "momentum_buffer" if args.sgd_momentum else None
    return kept is None or any(f"optimizer.state.{kept}." in name for name in tensors)


def _by_part(state: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The states of a chain's optimizers: experts have one of their own, and then they are by number."""
    return [one for _, one in sorted(state.items())] if all(isinstance(key, int) for key in state) else [state]


def is_torch(optimizer: Any) -> bool:
    """Whether it is one of torch's optimizers, and not a fused one."""
    return type(optimizer) in _TORCH_OPTIMIZERS
