"""Activation memory: what a run holds is what the simulator predicts, and nothing is left behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import tiny_gpt
import torch
from pool import Pool

from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.costs import Costs, StageCosts
from megatron.pipeline.schedule.simulate import activation_peaks

FLAGS = ("--seq-length", "64", "--hidden-size", "64", "--untie-embeddings-and-output-weights")


def peak_bytes(pipeline: Any, _chunks: Any) -> list[int]:
    return pipeline.report().peak_activation_bytes


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("microbatches", [3, 8])
def test_peak_is_the_simulators(pool: Pool, schedule: str, microbatches: int) -> None:
    stages = pool.run(4, measure_stage_costs)
    costs = Costs(tuple(StageCosts(1, 1, 1, held, retained) for held, retained in stages))
    predicted = activation_peaks(families.plan(schedule, 4, microbatches, costs), costs)
    measured = pool.run(
        4, tiny_gpt.train, schedule, pp=4, microbatches=microbatches, iterations=2, flags=FLAGS, inspect=peak_bytes
    )[0]
    assert measured == pytest.approx(predicted, rel=0.02)


def measure_stage_costs() -> tuple[int, int]:
    """Bytes that one microbatch holds on this stage after F, and after B."""
    run: Any = tiny_gpt.Run("zb-h1", pp=4, microbatches=1, flags=FLAGS)
    run.step(0)
    run.step(1)
    meter = run.pipeline._recorder._meter
    held = meter.peak

    from megatron.pipeline.runtime import executor

    retained = []
    original = executor._run

    def weights(tasks: Any) -> None:
        retained.append(meter_now().current)
        original(tasks)

    def meter_now() -> Any:
        return run.pipeline._executor._recorder._meter

    executor._run = weights
    try:
        run.step(2)
    finally:
        executor._run = original
    return held, retained[0]


def test_split_backward_frees_most_at_b(pool: Pool) -> None:
    for held, retained in pool.run(4, measure_stage_costs):
        assert 0 < retained < held


def what_is_left(schedule: str) -> tuple[int, int]:
    """Bytes counted, and tensors alive, after an iteration compared with after the one before."""
    run: Any = tiny_gpt.Run(schedule, pp=2, microbatches=6)
    run.step(0)
    gc.collect()
    before = _tensors()
    run.step(1)
    run.step(2)
    gc.collect()
    return run.pipeline._recorder._meter.current, _tensors() - before


def _tensors() -> int:
    return sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_nothing_is_left_behind(pool: Pool, schedule: str) -> None:
    for counted, tensors in pool.run(2, what_is_left, schedule):
        assert counted == 0
        assert tensors <= 0
