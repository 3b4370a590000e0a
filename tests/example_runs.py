"""What tests/test_examples.py runs on the pool: the programs of ``examples/``, and their functions."""

from __future__ import annotations

import importlib
import io
import runpy
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron.pipeline.runtime import stage_passes

EXAMPLES = Path(__file__).parents[1] / "examples"
Steps = list[tuple[list[list[list[float]]], float]]  # of each iteration: losses by microbatch and token, and the gradients' norm


def example(name: str) -> Any:
    """One of the examples, as a module."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def printed(script: str, *arguments: str) -> tuple[int, str, str]:
    """The exit code of one of the examples, run as a program in the pool's world, and what it prints."""
    example("random_tokens").start = lambda: None
    output, errors, code = io.StringIO(), io.StringIO(), 0
    sys.argv = [script, *arguments]
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as end:
            code = int(str(end.code))
    return code, output.getvalue(), errors.getvalue()


def optimizer_of(chunks: list[Any]) -> Any:
    """Adam that does not clip: norms have last digits of their own on a V, which clipping would carry into the weights."""
    return get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0), chunks)


def steps(chunks: list[Any], iterations: int = 3) -> Steps:
    """A few iterations of the training loop."""
    own, optimizer = example("own_training_loop"), optimizer_of(chunks)
    found = [own.run(chunks, own.batches(4, seed=iteration), optimizer) for iteration in range(iterations)]
    return [(torch.stack(losses).tolist() if losses else [], float(norm)) for losses, norm in found]


def own_training_loop(schedule: str) -> Steps:
    own = example("own_training_loop")
    own.plan(schedule)
    return steps(own.wrap(own.build()))


def varying_microbatches(schedule: str) -> tuple[list[Any], set[int]]:
    """Log-probabilities and losses of some iterations, and the numbers of microbatches that were planned for training."""
    own, varying = example("own_training_loop"), example("varying_microbatches")
    pipeline = own.plan(schedule)
    chunks = own.wrap(own.build())
    optimizer, found = optimizer_of(chunks), []
    for rollouts, trained in [(3, 2), (7, 5), (4, 1)]:
        parts = varying.iterate(chunks, optimizer, own.batches(rollouts, seed=rollouts), trained)
        found.append([torch.stack(part).tolist() if part else [] for part in parts])
    return found, set(pipeline.plans.planned)


class LowRank(NamedTuple):
    """What a training of adapters left on a rank.

    Attributes:
        weights: of every W, how often it computed the gradient of which weight, by name.
        trained: the weights that train.
        changed: the largest change of a frozen weight.
        planned: of every stage, which share of B its W is planned to take; empty under megatron-core's own schedule.
    """

    steps: Steps
    weights: list[Counter[str]]
    trained: set[str]
    changed: float
    planned: list[float]


def lora(schedule: str, trains: str = "adapters") -> LowRank:
    """Some iterations.

    Args:
        trains: "adapters", or in their place all weights with this in their names.
    """
    own, low_rank = example("own_training_loop"), example("lora")
    pipeline = own.plan(schedule)
    models = own.build()
    low_rank.adapt(models)
    weights = [(f"{chunk} {name}", weight) for chunk, model in enumerate(models) for name, weight in model.named_parameters()]
    for name, weight in weights if trains != "adapters" else []:
        weight.requires_grad_(trains in name)
    names = {id(weight): name for name, weight in weights}
    frozen = [(weight, weight.clone()) for _, weight in weights if not weight.requires_grad]
    chunks = own.wrap(models)
    passes, real = [], stage_passes.run_weights

    def run_weights(tasks: Any) -> None:
        passes.append(Counter(names[id(task.weight)] for task, _ in tasks))
        real(tasks)

    stage_passes.run_weights = run_weights
    try:
        found = steps(chunks)
    finally:
        stage_passes.run_weights = real
    changed = max(float((weight - before).abs().max()) for weight, before in frozen)
    trained = {name for name, weight in weights if weight.requires_grad}
    costs = () if pipeline.is_stock else pipeline.plans.planned_costs.stages
    return LowRank(found, passes, trained, changed, [stage.weight / (stage.backward or 1) for stage in costs])
