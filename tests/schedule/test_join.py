"""A choice per pass between B and W and a BW that takes less than both."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from schedule.optima import stored

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.time.orders import Orders, can_be_compiled
from megatron.pipeline.planner.schedule.time.replay import Stuck
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.join import join, saves, split

SLACK = 1 + 1e-9


def problem_of(name: str, ranks: int, microbatches: int, fused: float, hop: float = 0.0, limit: float | None = None) -> Problem:
    placement = families.placement(name, ranks)
    chunks = placement.chunks
    stage = StageCosts(1.0, 1.2, 0.8, 1.0, 1.0, fused, 1.0).share(chunks)
    costs = Costs((stage,) * (placement.last_stage + 1), hop)
    return Request(name, ranks, microbatches, costs, memory_limit=limit, objective="makespan").problem()


def length(problem: Problem, schedule: Schedule) -> float:
    return problem.value(simulate(schedule, problem.costs))


def kinds(schedule: Schedule) -> set[Kind]:
    return {work.kind for row in schedule.passes for work in row}


@examples(12)
@given(
    st.sampled_from(["zb-h1", "zb-h2", "zb-auto", "zb-v", "v-half", "gis"]),
    st.integers(2, 4),
    st.integers(1, 4),
    st.floats(1.2, 2.0),
    st.sampled_from([0.0, 0.1, 0.3]),
)
def test_no_plan_is_longer_than_split_or_fused_everywhere(name: str, ranks: int, rounds: int, fused: float, hop: float) -> None:
    problem = problem_of(name, ranks, max(2 * ranks, rounds * ranks), fused, hop)
    everywhere = frozenset(range(problem.placement.last_stage + 1))
    plan = planning.solve(name, problem)
    verify(plan, problem.costs, problem.limits)
    alone = replace(problem.costs.stages[0], fused=None)
    without = replace(problem, costs=replace(problem.costs, stages=(alone,) * len(everywhere)))
    assert length(problem, plan) <= length(problem, planning.solve(name, replace(problem, fused=everywhere))) * SLACK
    assert length(problem, plan) <= length(without, planning.solve(name, without)) * SLACK
    assert length(problem, plan) * SLACK >= lower_bound(problem)


@pytest.mark.parametrize("fused", [1.5, 1.7, 1.9])
@pytest.mark.parametrize(("name", "limit"), [("zb-auto", 3.0), ("v-auto", 2.0)])
def test_small_plans_are_near_the_optimum(name: str, limit: float, fused: float) -> None:
    """Split everywhere and fused everywhere are both longer."""
    ranks, microbatches = (3, 4) if name == "zb-auto" else (2, 4)
    problem = problem_of(name, ranks, microbatches, fused, 0.1, limit)
    plan = planning.solve(name, problem)
    best = stored("join")[f"{name} {fused}"]
    assert best <= length(problem, plan) * SLACK <= (1.015 if name == "zb-auto" else 1.05) * best
    assert {Kind.B, Kind.BW} <= kinds(plan)


def test_joining_and_splitting_keep_what_ranks_hold() -> None:
    problem = problem_of("zb-h1", 4, 8, 1.6)
    apart = planning.solve("zb-h1", problem_of("zb-h1", 4, 8, 2.0))
    joined = join(apart, problem)
    assert length(problem, joined) < length(problem, apart) and Kind.BW in kinds(joined)
    assert all(now <= then for now, then in zip(*(activation_peaks(one, problem.costs) for one in (joined, apart)), strict=True))
    whole = planning.solve("1f1b", problem_of("1f1b", 4, 8, 1.6))
    halves = split(whole, problem)
    assert length(problem, halves) < length(problem, whole) and {Kind.B, Kind.BW} <= kinds(halves)
    verify(halves, problem.costs, 4.0)


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("zb-v", 4, 16), ("zb-h1", 4, 16)])
def test_a_shorter_fused_backward_makes_no_plan_longer(name: str, ranks: int, microbatches: int) -> None:
    """Each plan is one of those that the next could be, and starts from all of them fused, or from some at even distances."""
    lengths = []
    for fused in (2.0, 1.92, 1.8):
        problem = problem_of(name, ranks, microbatches, fused, 0.05)
        lengths.append(length(problem, planning.solve(name, problem)))
    assert all(shorter <= longer * SLACK for longer, shorter in pairwise(lengths)) and lengths[-1] < lengths[0]


@pytest.mark.parametrize("fused", [None, 2.0, 1.985, 2.5])
def test_a_fused_backward_that_saves_nothing_stays_split(fused: float | None) -> None:
    assert not saves(StageCosts(1.0, 1.2, 0.8, fused=fused))
    assert saves(StageCosts(1.0, 1.2, 0.8, fused=1.97))


def test_stages_that_are_named_are_the_only_ones_that_fuse() -> None:
    problem = replace(problem_of("zb-h1", 4, 8, 1.5), fused=frozenset({2}))
    plan = planning.solve("zb-h1", problem)
    assert [rank for rank, row in enumerate(plan.passes) if any(work.kind is Kind.BW for work in row)] == [2]


def test_stages_on_which_it_saves_nothing_stay_split() -> None:
    problem = problem_of("zb-h1", 4, 8, 1.5)
    stages = list(problem.costs.stages)
    stages[1] = replace(stages[1], fused=2.0)
    plan = planning.solve("zb-h1", replace(problem, costs=replace(problem.costs, stages=tuple(stages))))
    assert Kind.BW not in {work.kind for work in plan.passes[1]} and Kind.BW in kinds(plan)


@pytest.mark.parametrize("name", ["zb-auto", "v-half", "interleaved"])
def test_compiled_lengths_are_those_of_the_simulation_bit_for_bit(name: str) -> None:
    problem = problem_of(name, 3, 6, fused=1.7, hop=0.07)
    schedule = planning.solve(name, problem)
    orders = Orders(schedule, problem.costs)
    for one in (schedule, schedule.forward_only()):
        timeline = simulate(one, problem.costs)
        assert can_be_compiled(one)
        ends = math.fsum(timed.end for row in timeline.ranks for timed in row)
        assert orders.lengths(one) == (timeline.span, timeline.makespan, ends)


def test_compiled_lengths_of_ranks_that_wait_for_each_other_do_not_exist() -> None:
    problem = problem_of("1f1b", 2, 2, fused=1.7)
    schedule = planning.solve("1f1b", problem)
    first, last = schedule.passes
    stuck = replace(schedule, passes=(first[::-1], last))
    with pytest.raises(Stuck):
        Orders(schedule, problem.costs).lengths(stuck)
