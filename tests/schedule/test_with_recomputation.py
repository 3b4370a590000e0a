"""Backwards that make activations again: their seconds and their memory count in plans, in bounds and in measured costs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron.pipeline.monitor.cost_profile import _stage as measured
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.stage_costs import PARTS
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.runtime.profiling import in_words

SLACK = 1 + 1e-9
STAGE = StageCosts(1.0, 1.2, 0.8, 1.0, 0.9, recompute=1.0, checkpoint=0.1)


def request(name: str, seed: int) -> Request:
    """Costs of passes and of R apart, of all stages or of some."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3])
    chunks = families.named(name).chunks
    stages = [replace(STAGE, forward=rng.uniform(0.8, 1.2)).share(chunks) for _ in range(ranks * chunks)]
    if seed % 2:
        stages[0] = replace(stages[0], recompute=0.0, checkpoint=stages[0].activation)
    return Request(name, ranks, rng.randint(4, 6), Costs(tuple(stages), 0.05), memory_limit=ranks * rng.choice([0.75, 1, 1.5]))


def solved(request: Request, costs: Costs) -> tuple[Schedule, Problem]:
    problem = replace(request, costs=costs).problem()
    return planning.solve(request.schedule, problem), problem


def test_a_backward_takes_and_holds_what_it_makes_again() -> None:
    again = STAGE.with_recomputation()
    assert (again.seconds(Kind.B), again.seconds(Kind.BW), again.weight) == (2.2, 3.0, 0.8)
    changes = [again.allocated(kind) for kind in (Kind.F, Kind.B, Kind.W)]
    assert changes == pytest.approx([0.1, 0.8, -0.9]) and again.allocated(Kind.BW) == -0.1
    assert (again.backward_allocates, STAGE.backward_allocates) == (pytest.approx(0.8), 0.0)
    assert replace(STAGE, fused=1.8).with_recomputation().fused == 2.8


def test_where_it_also_does_the_work_of_w() -> None:
    again = STAGE.with_recomputation(weights=True)
    parts = dict.fromkeys(PARTS, 0.1)
    of_experts = Costs((replace(STAGE, **parts).with_recomputation(weights=True),))
    assert Costs.from_json(of_experts.to_json()) == of_experts
    assert (again.backward, again.weight, again.seconds(Kind.BW)) == (3.0, 0.0, 3.0)
    assert [again.allocated(kind) for kind in (Kind.F, Kind.B, Kind.W)] == [0.1, -0.1, 0.0]


@pytest.mark.parametrize(("name", "seed"), [("zb-auto", 0), ("zb-auto", 1), ("v-auto", 1)])
def test_a_plan_is_no_longer_than_one_as_if_nothing_were_made_again(name: str, seed: int) -> None:
    asked = request(name, seed)
    assert isinstance(asked.costs, Costs) and asked.lowest_limit is not None
    trained = cutting.with_recomputation(asked.costs)
    (before, _), (after, problem) = solved(asked, asked.costs), solved(asked, trained)
    assert simulate(after, trained).span <= simulate(before, trained).span * SLACK
    verify(after, trained, asked.lowest_limit)
    assert lower_bound(problem) <= problem.value(simulate(after, trained)) * SLACK


def test_it_is_much_shorter_where_memory_was_short() -> None:
    costs = Costs((STAGE,) * 4, 0.05)
    asked = Request("zb-auto", 4, 6, costs, memory_limit=2.0)
    before, after = (
        simulate(solved(asked, one)[0], cutting.with_recomputation(costs)).span
        for one in (costs, cutting.with_recomputation(costs))
    )
    assert after < before / 1.2


def test_with_little_memory_some_backwards_hold_nothing_until_w() -> None:
    """One backward without its W would hold 0.9; the limit has room for the forwards' 0.1, and BW alone keeps to it."""
    costs = cutting.with_recomputation(Costs((STAGE,) * 3))
    schedule, _ = solved(Request("zb-auto", 3, 4, costs, memory_limit=0.8), costs)
    assert {work.kind for row in schedule.passes for work in row} == {Kind.F, Kind.BW}
    schedule, _ = solved(Request("zb-auto", 3, 4, costs, memory_limit=1.3), costs)
    assert max(activation_peaks(schedule, costs)) <= 1.3 * SLACK
    with pytest.raises(LimitTooLow):
        solved(Request("zb-auto", 3, 4, costs, memory_limit=0.05), costs)


@pytest.mark.parametrize(("limit", "value"), [(0.3, 16.2), (1.2, 15.4)])
def test_a_small_plan_is_near_the_optimum(limit: float, value: float) -> None:
    """Within 0.3 every backward is BW, as the optimum knows."""
    costs = cutting.with_recomputation(Costs((STAGE,) * 2, 0.1))
    schedule, problem = solved(Request("zb-auto", 2, 3, costs, memory_limit=limit), costs)
    assert lower_bound(problem) <= value * SLACK
    assert value <= problem.value(simulate(schedule, costs)) * SLACK <= 1.02 * value


def test_measured_costs_keep_what_a_backward_leaves_for_w() -> None:
    seconds = {Kind.F: 1.0, Kind.B: 2.2, Kind.W: 0.8}
    stage = measured(seconds, {Kind.F: 10.0, Kind.B: 80.0, Kind.W: -90.0})
    assert (stage.activation, stage.retained) == (10.0, 90.0)
    assert measured(seconds, {Kind.F: 10.0, Kind.B: 0.2, Kind.W: -10.2}).retained == 10.0  # as much
    assert "F holds 10 MiB, and B 90 until W" in in_words(Costs((replace(stage, activation=10 * 2**20, retained=90 * 2**20),)))
