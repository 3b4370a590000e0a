"""The planner: every plan obeys the rules and its limits, whatever the problem, and is as short as it is said to be."""

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from marked import rest
from schedule import optima
from schedule_strategies import links_of

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.placement import linear, v
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.rules.verify import rounded_up, verify, verify_programs
from megatron.pipeline.planner.schedule.search import search
from megatron.pipeline.planner.schedule.search.instance import Array, Instance, Plan
from megatron.pipeline.planner.schedule.search.search import _begin, _extended
from megatron.pipeline.planner.schedule.search.seeds import starts
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.join import saves

SEARCHED = ("zb-auto", "zb-v", "v-half", "v-min", "v-auto", "1f1b-v")
FREE = ("zb-auto", "v-auto")  # take any limit
SLACK = 1 + 1e-9


# Zero is likely, because ties are what breaks an order; others are no multiples of each other.
times = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.3, 2.0, 3.7]), st.floats(0.01, 10))
shares = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@st.composite
def stage_costs(draw: st.DrawFn, least_held: float = 0.0) -> StageCosts:
    activation = max(least_held, draw(st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.7])))
    forward, backward, weight = draw(times), draw(times), draw(times)
    fused = (backward + weight) * draw(st.sampled_from([0.5, 0.9, 1.0])) if draw(st.booleans()) else None
    return StageCosts(
        forward, backward, weight, activation, activation * draw(shares), fused, draw(times), activation * draw(shares)
    )


@st.composite
def problems(draw: st.DrawFn, names: tuple[str, ...] = SEARCHED, most_microbatches: int = 8) -> tuple[str, Problem]:
    """A family and a problem of its: any shape, any costs, R, BW, and where the family takes it, any limits."""
    name = draw(st.sampled_from(names))
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, most_microbatches))
    chunks = draw(st.integers(1 if name == "zb-auto" else 2, 3)) if name in FREE else None
    home = families.placement(name, ranks, chunks)
    stages = range(home.last_stage + 1)
    hops = st.sampled_from([0.0, 0.0, 0.1, 1.0, 4.0])
    costs = Costs(tuple(draw(stage_costs()) for _ in stages), draw(hops), links=draw(links_of(ranks, hops)))
    chosen = st.sets(st.sampled_from(stages)) if draw(st.booleans()) else st.just(set[int]())
    options: dict[str, Any] = {"objective": draw(st.sampled_from(Objective)), "recompute": draw(chosen), "fused": draw(chosen)}
    problem = planning.Request(name, ranks, microbatches, costs, chunks, **options).problem()
    if name in FREE:
        more = draw(st.lists(st.sampled_from([0.0, 0.0, 0.3, 0.5, 1.0, 2.5]), min_size=ranks, max_size=ranks))
        size = max(stage.activation for stage in costs.stages)
        problem = replace(problem, limits=tuple(problem.microbatch_memory(rank) + part * size for rank, part in enumerate(more)))
    return name, problem


def value(problem: Problem, schedule: Schedule) -> float:
    return problem.value(simulate(schedule, problem.costs))


def searched(name: str, problem: Problem) -> Problem:
    """The problem as the family searches it: the backwards of 1f1b-v are fused."""
    return replace(problem, fused=frozenset(range(problem.placement.last_stage + 1))) if name == "1f1b-v" else problem


@examples(30)
@given(problems())
def test_any_problem_is_planned_within_the_rules_and_its_limits(case: tuple[str, Problem]) -> None:
    name, problem = case
    schedule = planning.solve(name, problem)
    verify(schedule, problem.costs, problem.limits)
    verify(schedule.forward_only(), problem.costs, forward_only=True)
    verify_programs(schedule, lower(schedule, problem.costs))
    assert value(problem, schedule) * SLACK >= lower_bound(searched(name, problem))
    run = {(problem.placement.stage(rank, work.chunk), work.kind) for rank, row in enumerate(schedule.passes) for work in row}
    assert {stage for stage, kind in run if kind is Kind.R} == problem.recompute
    fused, asked = {stage for stage, kind in run if kind is Kind.BW}, searched(name, problem).fused
    assert fused >= asked and (fused == asked or not asked)  # where stages are named, these alone
    assert all(saves(problem.costs.stages[stage]) for stage in fused - asked)


@examples(6)
@given(problems(FREE, most_microbatches=5))
def test_more_memory_makes_no_plan_longer(case: tuple[str, Problem]) -> None:
    name, problem = case
    assert problem.limits is not None
    more = replace(problem, limits=tuple(limit * 1.5 for limit in problem.limits))
    assert value(more, planning.solve(name, more)) <= value(problem, planning.solve(name, problem)) * SLACK


@pytest.mark.parametrize("times", [(1, 1, 1), (1, 1.2, 0.8), (2, 1, 3)])
@pytest.mark.parametrize(
    ("name", "p", "m", "limit"), [("zb-auto", 4, 8, 4), ("zb-auto", 4, 8, 8), ("v-half", 4, 8, None), ("v-auto", 3, 7, 4)]
)
def test_each_objective_is_respected(name: str, p: int, m: int, limit: float | None, times: tuple[float, float, float]) -> None:
    costs = uniform(families.placement(name, p), *times, 0.1)
    plans = (planning.plan(name, p, m, costs, memory_limit=limit, objective=objective) for objective in Objective)
    spans, makespans = (simulate(plan, costs) for plan in plans)
    assert makespans.makespan <= spans.makespan * SLACK
    assert spans.span <= makespans.span * SLACK


@st.composite
def linear_costs(draw: st.DrawFn, ranks: int) -> Costs:
    """Costs of stages that hold the same, all of it until W."""
    stages = tuple(StageCosts(draw(times), draw(times), draw(times)) for _ in range(ranks))
    return Costs(stages, draw(st.sampled_from([0.0, 0.1, 0.5, 2.0])))


@examples(12)
@given(st.integers(1, 8), st.integers(1, 24), st.sampled_from(Objective), st.data())
def test_zb_auto_is_never_worse_than_zb_h1_and_zb_h2(p: int, m: int, objective: Objective, data: st.DataObject) -> None:
    costs = data.draw(linear_costs(p))
    for name, limit in (("zb-h1", p), ("zb-h2", 2 * p)):
        problem = planning.Request("zb-auto", p, m, costs, memory_limit=limit, objective=objective).problem()
        planned = value(problem, planning.solve("zb-auto", problem))
        assert planned <= value(problem, planning.plan(name, p, m, costs)) * SLACK


@pytest.mark.parametrize(
    ("name", "p", "m", "times", "hop"),
    [
        ("zb-auto", 4, 8, (1, 1, 1), 0), ("zb-auto", 4, 9, (1, 1.2, 0.8), 0.05), ("zb-auto", 3, 7, (2, 1, 3), 1),
        ("v-auto", 3, 7, (1, 1, 1), 0), ("v-auto", 2, 6, (1, 1.4, 0.9), 0.3),
    ],
)  # fmt: skip
def test_the_bubble_falls_with_every_bit_of_memory(
    name: str, p: int, m: int, times: tuple[float, float, float], hop: float
) -> None:
    costs = uniform(families.placement(name, p), *times, hop)
    spans = []
    for eighths in range(8, 3 * p * 8 + 1, 5):
        schedule = planning.plan(name, p, m, costs, memory_limit=eighths / 8, objective="span")
        assert max(activation_peaks(schedule, costs)) <= eighths / 8 * SLACK
        spans.append(simulate(schedule, costs).span)
    assert all(more <= less * SLACK for less, more in pairwise(spans))
    assert spans[-1] < spans[0]


def half_passes(name: str, p: int, m: int) -> tuple[float, float]:
    """The bubble of the span at F = B = W = 1, in passes of half a rank's share, and the peak in microbatches."""
    problem = planning.Request(name, p, m, objective="span").problem()
    schedule = planning.solve(name, problem)
    peak = max(activation_peaks(schedule, problem.costs))
    return 2 * (simulate(schedule, problem.costs).span - 3 * m), peak


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 8, *map(rest, (7, 9, 10, 11, 12)), 16])
def test_bubbles_and_peaks_on_a_v_at_equal_costs(p: int) -> None:
    """What Qi et al., "Pipeline Parallelism with Controllable Memory", and its code promise, or less."""
    for m in (2 * p, 4 * p + 1) if p > 6 else (2 * p, 3 * p, 4 * p + 1):
        bubble, peak = half_passes("zb-v", p, m)
        assert bubble == pytest.approx(0, abs=1e-6) and peak <= p
        bubble, peak = half_passes("v-half", p, m)
        assert bubble <= max(0, 3 * p - (7 if p % 2 == 0 else 4)) + 1e-6 and peak <= (p + 2) // 2
        bubble, peak = half_passes("v-min", p, m)
        assert bubble <= 4 * p - (7 if p % 3 == 0 else 5) + 1e-6 and peak <= (p + 4) // 3


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8, 16])
def test_1f1b_v_meets_the_bound(p: int) -> None:
    for m in (2 * p, 3 * p, 4 * p + 1):
        problem = searched("1f1b-v", planning.Request("1f1b-v", p, m).problem())
        schedule = planning.solve("1f1b-v", problem)
        assert value(problem, schedule) <= lower_bound(problem) * SLACK
        assert max(activation_peaks(schedule, problem.costs)) <= (-(-2 * p // 3) if p % 3 else 2 * p / 3 + 0.5)


@pytest.mark.parametrize("case", optima.CASES, ids=str)
def test_plans_are_within_two_percent_of_the_optimum(case: optima.Case) -> None:
    problem, least = case.problem(), optima.stored()[str(case)]
    planned = value(problem, planning.solve(case.name, problem))
    assert lower_bound(problem) <= least * SLACK
    assert least <= planned * SLACK
    assert planned <= least * 1.02


@pytest.mark.parametrize("name", FREE)
@given(p=st.integers(1, 5), m=st.integers(1, 4), data=st.data())
@examples(6)
def test_a_limit_below_one_microbatch_is_refused_with_the_least(name: str, p: int, m: int, data: st.DataObject) -> None:
    home = families.placement(name, p)
    costs = Costs(tuple(data.draw(stage_costs(least_held=0.5)) for _ in range(home.last_stage + 1)))
    problem = Problem(home, m, costs)
    rank = data.draw(st.integers(0, p - 1))
    least = [problem.microbatch_memory(rank) for rank in range(p)]
    limits = [least[other] * (0.99 if other == rank else 1) for other in range(p)]
    with pytest.raises(ValueError, match=re.escape(f"rank {rank}: a memory limit of ")) as error:
        planning.plan(name, p, m, costs, memory_limit=limits)
    assert str(error.value).endswith(f"give at least {rounded_up(least[rank])}")
    planning.plan(name, p, m, costs, memory_limit=least)


@pytest.mark.parametrize(("name", "least"), [("zb-v", 6), ("v-half", 4), ("v-min", 3), ("1f1b-v", 4.5)])
def test_a_limit_below_what_the_name_stands_for_is_refused_with_the_least(name: str, least: float) -> None:
    with pytest.raises(ValueError, match=rf"room for {least} microbatches.*the limit is {least - 0.5:g}: give at least {least},"):
        planning.plan(name, 6, 12, memory_limit=least - 0.5)
    assert max(activation_peaks(planning.plan(name, 6, 12, memory_limit=least), uniform(v(6)))) <= least


@pytest.mark.parametrize("name", ["v-half", "zb-auto"])
def test_the_limit_that_a_refusal_names_can_be_given(name: str) -> None:
    costs = uniform(families.placement(name, 3), activation=4.0000011, retained=1)  # rounds down where it is just printed
    with pytest.raises(ValueError, match="give at least") as error:
        planning.plan(name, 3, 4, costs, memory_limit=1)
    advised = re.findall(r"give at least ([\d.]+)", str(error.value))
    planning.plan(name, 3, 4, costs, memory_limit=float(advised[0]))


def test_zb_v_improves_with_more_than_its_memory() -> None:
    costs = uniform(v(4), 1, 1.4, 0.9, 0.2)
    plans = (planning.plan("zb-v", 4, 12, costs, memory_limit=limit, objective="span") for limit in (None, 5, 6))
    spans = [simulate(plan, costs).span for plan in plans]
    assert spans[0] > spans[1] >= spans[2]


def test_memory_enough_for_the_way_there_and_back_leaves_no_bubble() -> None:
    """Qi et al., "Zero Bubble Pipeline Parallelism", section 5.4: so many microbatches eliminate it, hops included."""
    p, m, f, b, w, hop = 6, 30, 1.0, 1.2, 0.8, 0.1
    limit = ((p - 1) * (b + 2 * hop) + (2 * p - 1) * f) // f
    costs = uniform(linear(p), f, b, w, hop)
    planned = planning.plan("zb-auto", p, m, costs, memory_limit=limit, objective="span")
    assert simulate(planned, costs).span_bubble_rate == pytest.approx(0, abs=1e-9)


def test_passes_may_take_no_time() -> None:
    costs = Costs(tuple(StageCosts(*times) for times in ((1.3, 7.2, 5.1), (1.3, 2, 1), (0.5, 5.8, 1), (0, 0, 1))))
    verify(planning.plan("v-min", 2, 2, costs), costs, memory_limit=2 * 2)  # two microbatches of two chunks


def test_stages_may_hold_nothing() -> None:
    costs = Costs((StageCosts(1, 1, 1, 0, 0),) * 2)
    verify(planning.plan("zb-auto", 2, 3, costs, memory_limit=0), costs, memory_limit=0)


@pytest.mark.parametrize(
    ("name", "p", "m", "times"),
    [("v-half", 4, 7, (1e9, 1e-9, 1e-9)), ("v-min", 8, 7, (1e-9, 1e9, 1e-9)), ("v-auto", 4, 3, (1e-9, 1e-9, 1e-9))],
)
def test_times_may_differ_by_more_than_a_float_can_tell(name: str, p: int, m: int, times: tuple[float, float, float]) -> None:
    costs = uniform(families.placement(name, p), *times, hop=1e100 if max(times) < 1 else 0)
    problem = planning.Request(name, p, m, costs).problem()
    verify(planning.solve(name, problem), problem.costs, problem.limits)


def test_searches_within_several_limits_share_their_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = uniform(families.placement("v-auto", 4), 1, 1.2, 0.8, hop=0.05)
    begun: list[Array] = []

    def begin(instance: Instance, known: list[Plan], limits: Array, *rest: Any) -> list[Plan]:
        begun.append(limits)
        return _begin(instance, known, limits, *rest)

    monkeypatch.setattr(search, "_begin", begin)
    plan = partial(planning.plan, "v-auto", 4, 12, costs, objective="span")
    alone = {}
    for limit in (4.5, 5.0, 5.5):
        search._level.cache_clear()
        alone[limit] = plan(memory_limit=limit)
    levels = len(begun)
    begun.clear()
    search._level.cache_clear()
    assert {limit: plan(memory_limit=limit) for limit in reversed(alone)} == alone
    assert len(begun) < levels


@pytest.mark.parametrize(("name", "extended"), [("v-auto", False), ("v-half", True)])
def test_a_plan_near_the_bound_ends_a_level_of_a_long_problem(name: str, extended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_extended", begun := Mock(side_effect=_extended))
    problem = planning.Request(name, 16, 128, uniform(v(16), 1, 1.2, 0.8, 0.05), objective="span").problem()
    assert value(problem, planning.solve(name, problem)) <= lower_bound(problem) * search._CLOSE
    assert begun.called == extended


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_list_scheduling_ends_early_only_where_a_plan_is_longer_than_one_of_use(objective: str) -> None:
    costs = uniform(v(4), 1, 1.2, 0.8, 0.05)
    instance = Instance(planning.Request("v-auto", 4, 12, costs, objective=objective).problem())
    limits = np.full(4, 3.0)
    plans = list(starts(instance, limits, 40))
    longest = float(np.median([plan.value for plan in plans]))
    bounded = list(starts(instance, limits, 40, lambda: longest))
    assert len(bounded) == len(plans)
    for plan, other in zip(plans, bounded, strict=True):
        assert other.order.tolist() == plan.order.tolist() if other.value < np.inf else plan.value > longest
    assert np.inf in [plan.value for plan in bounded]
