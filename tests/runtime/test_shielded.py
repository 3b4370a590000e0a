"""Collectives of B hidden behind weight gradients: no bit of a training is another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
from marked import rest
from pool import Pool
from runtime.shielded import costs

TENSOR = "--sequence-parallel --untie-embeddings-and-output-weights"

ITERATIONS = 2  # the second goes on from what the first has changed


def train(schedule: str, flags: str, stages: int, pp: int, **given: Any) -> list[tiny_gpt.Step]:
    """Steps of a training all of whose stages are shielded."""
    run = tiny_gpt.Run(schedule, pp=pp, tp=2, microbatches=8, flags=tuple(flags.split()), **given)
    assert run.pipeline.plans.plan(8).schedule.shielded == {*range(stages)}
    return [run.step(iteration) for iteration in range(ITERATIONS)]


@pytest.mark.parametrize(
    ("ranks", "schedule", "stages", "flags"),
    [
        rest(4, "zb-h1", 2, "--untie-embeddings-and-output-weights"),
        (4, "zb-v", 4, f"{TENSOR} --recompute-granularity selective --recompute-modules mlp core_attn --disable-bias-linear"),
        rest(8, "zb-v", 4, f"{TENSOR} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    ],
)
def test_trains_as_stock_does(pool: Pool, tmp_path: Path, ranks: int, schedule: str, stages: int, flags: str) -> None:
    pp = 2 if "distributed" in flags else ranks // 2
    given = f"--clip-grad 0 {flags}"
    found = pool.run(ranks, train, schedule, f"{given} {costs(tmp_path, stages)}", stages, pp)
    options: dict[str, Any] = {"pp": pp, "tp": 2, "microbatches": 8, "iterations": ITERATIONS, "flags": tuple(given.split())}
    stock = pool.run(ranks, tiny_gpt.train, "stock", **options)
    losses = [[loss for rank in run for loss, _ in rank if loss is not None] for run in (found, stock)]
    assert losses[0] == losses[1] and len(losses[0]) >= 2 * ITERATIONS
