"""Plans of batches: within the limits of memory in each, no longer than the order for equal microbatches, and made elsewhere."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from marked import rest

from megatron.pipeline.planner.planning import Request, loads_of
from megatron.pipeline.planner.planning.aside import PlannedBatch, PlanningProcess, plan_batch
from megatron.pipeline.planner.planning.plan_cache import PlanCache
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.loads import Extent, Load
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, Objective
from megatron.pipeline.planner.schedule.lower.program import Posting
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate


def cache(schedule: str, limit: float | None = None, **options: Any) -> PlanCache:
    costs = uniform(families.placement(schedule, 4), 1, 1.2, 0.8, hop=0.02)
    request = Request(schedule, 4, 1, costs, memory_limit=limit, objective=Objective.MAKESPAN, **options)
    return PlanCache(request)


def batches(count: int, seed: int) -> Iterator[tuple[Load, ...]]:
    """Loads of microbatches of a few sequences, with a long tail."""
    draw = random.Random(seed)
    for _ in range(count):
        lengths = [
            [round(draw.lognormvariate(0, 1) * 500) + 1 for _ in range(draw.randint(1, 4))] for _ in range(draw.randint(4, 9))
        ]
        yield loads_of(lengths, attention=draw.choice((0.0, 0.2)))


@pytest.mark.parametrize(
    ("schedule", "limit"), [rest("zb-auto", None), ("zb-auto", 6.0), rest("zb-v", None), rest("v-auto", 5.0)]
)
def test_the_limit_is_kept_in_every_batch_or_refused(schedule: str, limit: float | None) -> None:
    """The longest microbatch may need more than there is."""
    plans, kept = cache(schedule, limit), 0
    for loads in batches(60, seed=len(schedule)):
        request = plans.of_batch(len(loads), loads)
        try:
            batch = plan_batch(request)
        except LimitTooLow as refused:
            if limit is None or refused.least <= limit:
                raise
            continue
        kept += 1
        planned, limits = batch.planned, request.problem().limits
        assert limits is not None and planned.problem.costs.loads == loads
        verify(planned.schedule, planned.problem.costs, limits)
        assert all(peak <= most * (1 + 1e-9) for peak, most in zip(planned.peaks, limits, strict=True))
    assert kept >= 48


def test_no_plan_is_longer_than_the_order_for_equal_microbatches_where_that_fits() -> None:
    plans, gains = cache("v-auto", limit=8.0), []
    for loads in batches(25, seed=5):
        batch, equal = plan_batch(plans.of_batch(len(loads), loads)), plans.plan(len(loads)).schedule
        costs = batch.planned.problem.costs
        assert batch.of_equal == simulate(equal, costs).makespan
        limits = batch.planned.problem.limits
        assert limits is not None
        if all(peak <= most for peak, most in zip(activation_peaks(equal, costs), limits, strict=True)):
            gains.append(1 - batch.planned.value / batch.of_equal)
    assert len(gains) > 8 and min(gains) >= 0 and max(gains) > 0.02


@pytest.mark.parametrize(
    ("schedule", "lengths"), [("zb-auto", [5]), ("zb-v", [5, 1]), ("zb-auto", [1, 1, 1, 10_000, 1, 10_000]), ("zb-v", [7] * 8)]
)
def test_batches_of_few_or_very_unequal_or_equal_microbatches_are_planned(schedule: str, lengths: list[int]) -> None:
    loads = loads_of([[length] for length in lengths], attention=0.2)
    for any_order in (False, True):
        made = plan_batch(cache(schedule).of_batch(len(loads), loads), any_order=any_order)
        batch = PlannedBatch.unpacked(made.packed())
        assert batch.gain == made.gain >= 0 and "timeline" not in vars(batch.planned)
        assert batch.planned.value >= batch.planned.bound * (1 - 1e-9)
        assert any_order or len(set(lengths)) > 1 or batch.gain == 0


def test_a_process_answers_as_this_one_does_and_goes_on_after_a_refusal() -> None:
    plans, process = cache("zb-v", limit=8.0), PlanningProcess()
    good, *_ = batches(1, seed=1)
    asked = [
        plans.of_batch(len(good), good),
        plans.of_batch(len(good) + 1, [*good, Extent.of([100]).load(1)]),
        plans.of_batch(len(good), good),
    ]
    first, refused, again = (process.plan(request, Posting.SINGLE, False) for request in asked)
    here = plan_batch(asked[0])
    for answer in (first, again):
        there = PlannedBatch.unpacked(answer.result(timeout=120))
        assert there.planned.schedule == here.planned.schedule and there.planned.programs == here.planned.programs
        assert there.of_equal == here.of_equal and "leads" in vars(there.planned)
    with pytest.raises(LimitTooLow, match="the limit is 8: give at least") as error:
        refused.result(timeout=120)
    assert error.value.least > 8


def test_a_request_of_functions_can_be_read_by_another_process() -> None:
    def costs_nobody_can_pickle(placement: Any, vocabulary: Any) -> Any:
        return [replace(uniform(placement).stages[0], weight=0.5)] * placement.depth

    request = Request("zb-auto", 4, 1, equal=costs_nobody_can_pickle, recompute=lambda placement: (0,))
    loads, *_ = batches(1, seed=2)
    answer = PlanningProcess().plan(PlanCache(request).of_batch(len(loads), loads), Posting.SINGLE, True).result(timeout=120)
    planned = PlannedBatch.unpacked(answer).planned
    assert planned.schedule.reruns and planned.problem.costs.stages[3].weight == 0.5


@pytest.mark.parametrize(("number", "patience"), [(signal.SIGKILL, 100), (signal.SIGSTOP, 1)])
def test_a_process_that_is_killed_or_stopped_says_so_and_is_replaced(number: signal.Signals, patience: float) -> None:
    loads, *_ = batches(1, seed=3)
    request, process = cache("zb-v").of_batch(len(loads), loads), PlanningProcess()
    first = process.plan(request, Posting.SINGLE, False).result(timeout=120)
    assert process._process is not None
    process._patience = patience
    process._process.send_signal(number)
    with pytest.raises(
        ChildProcessError, match=r"the process that plans has ended with code -9, .*; the next plan starts another"
    ):
        process.plan(request, Posting.SINGLE, False).result(timeout=60)
    process._patience = 100
    again = process.plan(request, Posting.SINGLE, False).result(timeout=120)
    assert PlannedBatch.unpacked(again).planned.schedule == PlannedBatch.unpacked(first).planned.schedule


@pytest.mark.parametrize("ends", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_nothing_stays_behind_and_nothing_is_waited_for(ends: str) -> None:
    """A rank that ends while its process should plan, and is stopped."""
    program = f"""
import os, signal, time
from megatron.pipeline.planner.planning import Request, loads_of
from megatron.pipeline.planner.planning.aside import PlanningProcess
from megatron.pipeline.planner.planning.plan_cache import PlanCache
from megatron.pipeline.planner.schedule.lower.program import Posting
process, loads = PlanningProcess(), loads_of([[number % 7 + 1] for number in range(8)])
request = PlanCache(Request("zb-auto", 4, 1)).of_batch(len(loads), loads)
process.plan(request, Posting.SINGLE, False).result(timeout=100)
process._process.send_signal(signal.SIGSTOP)
process.plan(request, Posting.SINGLE, False)
print(process._process.pid, flush=True)
time.sleep(0.5)
{ends}
"""
    ran = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=100, check=False, text=True)
    child = Path("/proc") / ran.stdout.strip() / "stat"
    for _ in range(100):
        if not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z":  # for the one that adopts it to reap
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"process {ran.stdout.strip()} is still there")
