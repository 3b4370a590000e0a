"""The state of optimizers in checkpoints: its tensors, its kind, and the flags that can go on with it.

megatron-core supports torch's own optimizers only in part: see ``patches/torch_optimizers.py`` and, for the distributed
optimizer, ``patches/distrib_optimizer.py``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.pipeline.patches import compat
from megatron.pipeline.patches.torch_optimizers import WITH_STEPS, allocate_state

from megatron.pipeline.planner import flag_of
from megatron.pipeline.runtime.optimizer.step_ahead import parts_of

_OPTIMIZER, _DISTRIBUTED, _SIXTEEN_BITS = "--optimizer", "--use-distributed-optimizer", "--bf16 or --fp16"
_EXPERTS = "an own optimizer for experts (--expert-model-parallel-size above 1)"


def sharded_state(optimizer: MegatronOptimizer, model: dict[str, Any], is_loading: bool, metadata: dict[str, Any]) -> Any:
    """``optimizer.sharded_state_dict``, of a state that exists and with a number of steps of 0, which upstream omits."""
    for part in parts_of(optimizer):
        allocate_state(part)
    state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    for one, own in zip(parts_of(optimizer), _by_part(state), strict=True):
        inner = own.get("optimizer", own)
        if "state" in inner and type(one.optimizer) in WITH_STEPS:
            inner["state"].setdefault("common_step", torch.tensor(0.0))
    return state


def load_state(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """``optimizer.load_state_dict(state)``, where a state with a constant loss scale also goes on with a dynamic one."""
    for own in _by_part(state):
        if not own.get("grad_scaler", True):
            del own["grad_scaler"]  # of a constant scale; a dynamic one starts with its initial value
    optimizer.load_state_dict(state)


def kind_of_state(state: dict[Any, Any]) -> dict[str, Any]:
    """Flags that decide which optimizers can go on with a state.

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
    kind |= {_DISTRIBUTED: distributed, _EXPERTS: len(_by_part(state)) > 1}
    # A distributed optimizer keeps float32 weights of any model; without one those of 16 bits have another state.
    return kind | ({} if distributed else {_SIXTEEN_BITS: "optimizer" in first})


def wanted_kind(args: Namespace) -> dict[str, Any]:
    """The flags that ``kind_of_state`` has; of experts only for a model that has some."""
    names = ("optimizer", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "use_distributed_optimizer")
    kind = {flag_of(name): getattr(args, name) for name in names} | {_SIXTEEN_BITS: args.bf16 or args.fp16}
    if args.num_experts is None:
        return kind
    # Up to 0.18 gradients of all experts are reduced over the ranks of dense layers.
    other_ranks = args.expert_tensor_parallel_size != args.tensor_model_parallel_size and compat.is_from("0.19")
    return kind | {_EXPERTS: args.expert_model_parallel_size > 1 or other_ranks}


def has_state(args: Namespace, tensors: Iterable[str]) -> bool:
    """Tell whether a checkpoint of these tensors has what the optimizer keeps of every parameter: not before its first step,
    once.
    """
    kept = "exp_avg" if args.optimizer == "adam" else "momentum_buffer" if args.sgd_momentum else None
    return kept is None or any(f"optimizer.state.{kept}." in name for name in tensors)


def _by_part(state: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The states of a chain's optimizers: experts have one of their own, and then they are by number."""
    return [one for _, one in sorted(state.items())] if all(isinstance(key, int) for key in state) else [state]
