"""Activation memory: what a run holds is what the simulator predicts, and nothing is left behind."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import tiny_gpt
import torch
from marked import rest
from pool import Pool

from megatron.pipeline.backward.weight_tasks import WeightTask
from megatron.pipeline.monitor.cost_profile import measured_costs
from megatron.pipeline.monitor.memory import ActivationMeter
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import MOST_WAITING
from megatron.pipeline.planner.schedule.core.passes import Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement, linear, v
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks
from megatron.pipeline.planner.schedule.transforms.vocabulary import postponed
from megatron.pipeline.runtime.stage_passes import run_weights
from megatron.pipeline.runtime.vocabulary import VocabularyPasses

FLAGS = ("--num-layers", "8", "--seq-length", "64", "--hidden-size", "64", "--untie-embeddings-and-output-weights")


def peak_bytes(pipeline: Any, _chunks: Any) -> list[int]:
    return pipeline.report().peak_activation_bytes


def peak_bytes_and_plan(pipeline: Any, _chunks: Any) -> tuple[list[int], Schedule]:
    [planned] = pipeline.plans.planned.values()
    return pipeline.report().peak_activation_bytes, planned


def stage_costs(schedule: str, vocabulary: str = "off") -> Costs:
    """What one microbatch holds on every stage, measured with no other in flight."""
    run = tiny_gpt.Run(schedule, pp=4, microbatches=1, flags=(*FLAGS, "--vocab-parallel", vocabulary))
    for iteration in range(2):
        run.step(iteration)
    report = run.pipeline.report()
    assert report is not None
    return measured_costs([report], report)


@functools.cache
def costs_on(pool: Pool, placement: Placement, splits: int) -> Costs:
    """The costs of the stages of a placement, by a family that splits the backward there."""
    name = {1: "zb-h1", 2: "zb-v" if placement == v(4) else "gis"}[placement.chunks] if splits == 1 else "seq-1f1b"
    return pool.run(4, stage_costs, name)[0]


# With one placement and the same kinds of passes another one stands for zb-h2, gis-h, v-min and 1f1b-v.
SCHEDULES = [name for name in families.FAMILIES if name not in ("zb-h2", "gis-h", "v-min", "1f1b-v")]
DAILY = ("1f1b", "zb-h1", "zb-v", "seq-1f1b", "dualpipe-v")


@pytest.mark.parametrize("schedule", [name if name in DAILY else rest(name) for name in SCHEDULES])
def test_peak_is_the_simulators(pool: Pool, schedule: str) -> None:
    measured, planned = pool.run(
        4, tiny_gpt.train, schedule, pp=4, microbatches=8, iterations=2, flags=FLAGS, inspect=peak_bytes_and_plan
    )[0]
    predicted = activation_peaks(planned, costs_on(pool, planned.placement, planned.splits))
    # Slices hold unequal amounts, the first one the keys and values of all; the simulation gives each an equal share.
    assert measured == pytest.approx(predicted, rel=0.02 if planned.splits == 1 else 0.05)


@pytest.mark.parametrize(("schedule", "variant"), [rest("1f1b", "2"), ("v-half", "2")])
def test_a_spread_vocabulary_holds_a_microbatch_more_per_barrier(pool: Pool, schedule: str, variant: str) -> None:
    """FixedMemory the logits of the few microbatches between S and T."""
    vocabulary = Vocabulary(variant)
    planned, dense = (planning.plan(schedule, 4, 8, vocabulary=one) for one in (vocabulary, None))
    costs = pool.run(4, stage_costs, {1: "zb-h1", 2: "zb-v"}[planned.placement.chunks], variant)[0]
    flags = (*FLAGS, "--vocab-parallel", variant)
    spread = pool.run(4, most_held, schedule, flags)
    measured = spread[0][0]
    assert measured == pytest.approx(activation_peaks(planned, costs), rel=0.02)
    whole = costs.stages[0].activation * planned.placement.chunks
    more = [(held - before) / whole for held, before in zip(measured, activation_peaks(dense, costs), strict=True)]
    assert max(more) < postponed(vocabulary, 4) + 0.15
    assert all(embeddings <= MOST_WAITING for _, embeddings in spread)


def most_held(schedule: str, flags: tuple[str, ...]) -> tuple[list[int], int]:
    """Peak activation bytes of all ranks, and the most microbatches of which this one holds an embedding outside of a stage."""
    counts = []
    real = VocabularyPasses.run

    def run(self: VocabularyPasses, *given: Any) -> list[Any]:
        made = real(self, *given)
        counts.append(sum(one.embedding is not None for one in self._microbatches.values()))
        return made

    with patch.object(VocabularyPasses, "run", run):
        peaks = tiny_gpt.train(schedule, pp=4, microbatches=8, iterations=2, flags=flags, inspect=peak_bytes)
    return peaks, max(counts)


def test_split_backward_frees_most_at_b(pool: Pool) -> None:
    for stage in costs_on(pool, linear(4), 1).stages:
        assert 0 < stage.retained < stage.activation


def what_is_left(schedule: str, vocabulary: str) -> tuple[int, int]:
    """Bytes counted, and tensors alive, after an iteration compared with after the one before."""
    run: Any = tiny_gpt.Run(schedule, pp=2, microbatches=6, flags=("--vocab-parallel", vocabulary))
    run.step(0)
    before = _tensors()
    run.step(1)
    run.step(2)
    deadline = time.monotonic() + 10
    while (more := _tensors() - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread of gloo may still hold what it has sent; what is left behind stays
    return run.pipeline._measured[0]._meter.current, more


def _tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))


@pytest.mark.parametrize(("schedule", "vocabulary"), [("zb-h1", "off"), ("zb-h1", "1"), ("1f1b", "2")])
def test_nothing_is_left_behind(pool: Pool, schedule: str, vocabulary: str) -> None:
    for counted, tensors in pool.run(2, what_is_left, schedule, vocabulary):
        assert counted == 0
        assert tensors <= 0


def test_a_forward_without_a_backward_leaves_nothing() -> None:
    """Softmax saves its own output: whoever keeps that output with its graph keeps both for ever."""
    meter = ActivationMeter([])
    with meter.saving():
        probabilities = torch.softmax(torch.randn(8, 8, requires_grad=True), dim=-1)
    assert meter.current == 4 * 64
    del probabilities
    assert meter.current == 0


def test_a_tensor_whose_memory_is_taken_away_is_not_counted_for_ever() -> None:
    """Transformer Engine empties tensors that it has saved, when its backward is done with them."""
    meter = ActivationMeter([])
    counted = meter.hold(torch.zeros(64))
    counted.tensor.data = torch.Tensor()
    del counted
    assert meter.current == 0


def test_w_lets_go_of_each_task_once_it_has_run() -> None:
    class Task:
        held = ()

        def prefetch(self) -> None:
            """Nothing to fetch."""

        def run(self) -> None:
            left.append(len(alive))

    tasks = [Task() for _ in range(4)]
    alive, left = weakref.WeakSet(tasks), list[int]()
    waiting: list[tuple[WeightTask, list[Any]]] = [(tasks.pop(), []) for _ in range(4)]
    run_weights(waiting)
    assert left == [4, 3, 2, 1]
