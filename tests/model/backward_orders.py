"""Backwards of several microbatches in any order: ``"B0 B1 W0 BW2 W1"``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.pipeline.backward.weight_tasks import WeightTask, deferring


def run_backwards(order: str, losses: Sequence[torch.Tensor], tasks_of_b: int) -> None:
    """Run B, W or BW of the losses, one after another.

    Args:
        tasks_of_b: how many weight tasks every B is to leave.
    """
    tasks: dict[int, list[WeightTask]] = {number: [] for number in range(len(losses))}
    for step in order.split():
        kind, number = step.rstrip("0123456789"), int(step.lstrip("BW"))
        if kind == "BW":
            losses[number].backward()
        elif kind == "B":
            with deferring(tasks[number]):
                losses[number].backward()
            assert len(tasks[number]) == tasks_of_b
        else:
            with torch.no_grad():
                for task in tasks[number]:
                    task.run()
