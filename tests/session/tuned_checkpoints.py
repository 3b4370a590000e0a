"""What tests/session/test_fine_tuning.py runs on the pool: checkpoints of adapters alone, and of what they are merged into."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from example_runs import example
from megatron.core import dist_checkpointing, parallel_state
from session.tuned_loops import Beside, Loop, Tuning, started


class Kept(NamedTuple):
    """Of a rank.

    Attributes:
        losses: by microbatch, behind the checkpoint of adapters; empty but on the last rank.
        merged: losses of forwards alone of what that checkpoint is merged into.
        weights: the layers' merged ones, by name.
    """

    losses: list[list[float]]
    merged: list[float]
    weights: dict[str, list[float]]


def saved(schedule: str, folder: str) -> Kept:
    """Two steps, a checkpoint of what trains and its optimizer, two more, and a checkpoint of merged weights."""
    loop = started(schedule, Tuning())
    for seed in range(2):
        loop.step(4, seed)
    _folder(folder)
    dist_checkpointing.save(_adapters(loop), folder)
    losses = [loop.step(4, seed)[0] for seed in (2, 3)]
    _merge(loop.models)
    merged = f"{folder}-merged"
    _folder(merged)
    dist_checkpointing.save(_whole(loop), merged)
    return Kept(losses, _forwards(loop), _weights(loop.models))


def resumed(schedule: str, folder: str) -> Kept:
    """The two steps behind such a checkpoint of others; then their merged weights, in a model without adapters."""
    loop = started(schedule, Tuning())
    _forget([weight for weight in _parameters(loop) if weight.requires_grad])
    state = dist_checkpointing.load(_adapters(loop, loads=True), folder)
    for number, model in enumerate(loop.models):
        missing, unexpected = model.load_state_dict(state[f"chunk{number}"], strict=False)
        assert not unexpected and not [name for name in missing if ".down." in name or ".up." in name]
    loop.optimizer.load_state_dict(state["optimizer"])
    losses = [loop.step(4, seed)[0] for seed in (2, 3)]
    _merge(loop.models)
    _forget(_parameters(loop))
    state = dist_checkpointing.load(_whole(loop), f"{folder}-merged")
    for number, model in enumerate(loop.models):
        model.load_state_dict(state[f"chunk{number}"])
    return Kept(losses, _forwards(loop), _weights(loop.models))


def _adapters(loop: Loop, loads: bool = False) -> dict[str, Any]:
    chunks = {
        name: {key: value for key, value in chunk.items() if getattr(getattr(value, "data", None), "requires_grad", False)}
        for name, chunk in _whole(loop).items()
    }
    return chunks | {"optimizer": loop.optimizer.sharded_state_dict(chunks, is_loading=loads)}


def _whole(loop: Loop) -> dict[str, Any]:
    return {f"chunk{number}": model.sharded_state_dict() for number, model in enumerate(loop.models)}


def _folder(path: str) -> None:
    if torch.distributed.get_rank() == 0:
        Path(path).mkdir(parents=True)
    torch.distributed.barrier()


def _parameters(loop: Loop) -> list[Any]:
    return [weight for model in loop.models for weight in model.parameters()]


def _forget(weights: list[Any]) -> None:
    """Make numbers wrong that a checkpoint has."""
    for weight in weights:
        weight.data.zero_()


def _merge(models: list[Any]) -> None:
    """Put each linear with an adapter in the adapter's place."""
    modules: list[Any] = [module for model in models for module in model.modules()]
    for module in modules:
        for name, child in list(module.named_children()):
            if isinstance(child, Beside):
                child.linear.weight.data += child.up.weight.data @ child.down.weight.data
                setattr(module, name, child.linear)


def _forwards(loop: Loop) -> list[float]:
    own = example("own_training_loop")
    found, _ = own.run(loop.wrapped, own.batches(3, seed=5))
    return [float(one.mean()) for one in found] if parallel_state.is_pipeline_last_stage() else []


def _weights(models: list[Any]) -> dict[str, list[float]]:
    layers = [layer for model in models for layer in model.decoder.layers]
    return {
        f"{layer.layer_number}.{name}": weight.flatten().tolist() for layer in layers for name, weight in layer.named_parameters()
    }
