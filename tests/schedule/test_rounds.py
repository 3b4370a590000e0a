"""Plans made in rounds, and what they add to the search: never behind the published planner, at any size, with any memory."""

from itertools import pairwise

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from marked import rest, whole

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.search.instance import Instance
from megatron.pipeline.planner.schedule.search.rounds import can_be_in_rounds, rounds
from megatron.pipeline.planner.schedule.time.simulate import simulate

SLACK = 1 + 1e-9
TIMES = st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.3, 2.0, 3.7])
# Milliseconds of F, B, W and a hop; W keeps 0.43 of the activations.
COSTS = {"28B": (10.419, 10.207, 7.715, 0.408), "fork": (30.715, 31.308, 18.746, 0.473)}


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any costs and limits on a line and on a V."""
    name, ranks, microbatches = draw(st.sampled_from(["zb-auto", "v-auto"])), draw(st.integers(1, 6)), draw(st.integers(1, 20))
    home = families.placement(name, ranks)
    fused = draw(st.sampled_from([(), (0,), tuple(range(home.last_stage + 1))]))
    size, kept = draw(st.sampled_from([0.0, 0.5, 1.0])), draw(st.sampled_from([0.0, 0.43, 1.0]))
    stages = tuple(StageCosts(draw(TIMES), draw(TIMES), draw(TIMES), size, size * kept) for _ in range(home.last_stage + 1))
    costs = Costs(stages, draw(st.sampled_from([0.0, 0.1, 2.0])))
    limit = home.chunks * size * draw(st.floats(1, 3 * ranks))
    return planning.Request(name, ranks, microbatches, costs, memory_limit=limit, fused=fused, objective="span").problem()


@examples(40)
@given(problems())
def test_rounds_obey_the_rules_and_the_limits(problem: Problem) -> None:
    instance = Instance(problem)
    assert can_be_in_rounds(instance) and problem.limits is not None
    for few in (False, True):
        for plan in rounds(instance, np.array(problem.limits), few=few):
            schedule = Schedule("rounds", problem.placement, problem.microbatches, instance.passes(plan))
            verify(schedule, problem.costs, problem.limits)
            assert simulate(schedule, problem.costs).span == pytest.approx(plan.span)


def test_no_rounds_are_made_that_are_longer_than_wanted() -> None:
    costs = Costs((StageCosts(1, 1.2, 0.8),) * 6, 0.3)
    problem = planning.Request("zb-auto", 6, 20, costs, memory_limit=9, objective="span").problem()
    instance, limits = Instance(problem), np.array(problem.limits, float)
    spans = [plan.span for plan in rounds(instance, limits)]
    shortest = min(spans)
    assert shortest < max(spans)
    assert {plan.span for plan in rounds(instance, limits, longest=shortest)} == {shortest}
    assert not [*rounds(instance, limits, longest=0.999 * shortest)]


@pytest.mark.parametrize("name", ["zb-auto", "v-auto"])
@pytest.mark.parametrize(("p", "m"), [(4, 3), (7, 4), (11, 8), (14, 9), (14, 14)])
def test_memory_beyond_what_all_microbatches_hold_changes_no_rounds(name: str, p: int, m: int) -> None:
    home = families.placement(name, p)
    costs = Costs((StageCosts(1, 1.2, 0.8, 1, 0.5).share(home.chunks),) * (home.last_stage + 1), 0.05)
    instance = Instance(planning.Request(name, p, m, costs, memory_limit=9 * m).problem())
    enough, more = ([plan.span for plan in rounds(instance, np.full(p, float(limit)))] for limit in (m, 9 * m))
    assert enough == more != []


@pytest.mark.parametrize("name", ["zb-auto", "v-auto", "1f1b-v"])
def test_there_are_no_rounds_of_what_they_do_not_know(name: str) -> None:
    problem = planning.Request(name, 4, 8, recompute=[1]).problem()
    assert not can_be_in_rounds(Instance(problem))
    assert not [*rounds(Instance(problem), np.full(4, 99.0))]


@pytest.mark.parametrize(
    ("name", "kind", "times", "published"),
    [
        ("zb-auto", "28B", 1.25, 1484.037), rest("zb-auto", "28B", 1.5, 1442.361), ("zb-auto", "28B", 2, 1369.428),
        ("zb-auto", "fork", 1.25, 4280.98), rest("zb-auto", "fork", 1.5, 4123.801), ("zb-auto", "fork", 2, 3947.162),
        ("v-auto", "28B", 1.25, 1386.2555), rest("v-auto", "28B", 1.5, 1365.264), ("v-auto", "28B", 2, 1365.264),
        ("v-auto", "fork", 1.25, 3948.292), rest("v-auto", "fork", 1.5, 3899.021), ("v-auto", "fork", 2, 3895.5495),
    ],
)  # fmt: skip
def test_plans_are_never_behind_the_published_planner(name: str, kind: str, times: float, published: float) -> None:
    """Spans that it takes for 48 microbatches on 16 ranks, within so many times 1F1B's memory (docs/planner.md, head to head)."""
    f, b, w, hop = COSTS[kind]
    home = families.placement(name, 16)
    costs = Costs((StageCosts(f, b, w, 1, 0.43).share(home.chunks),) * (home.last_stage + 1), hop)
    schedule = planning.plan(name, 16, 48, costs, memory_limit=16 * times, objective="span")
    assert simulate(schedule, costs).span <= published * (1 + 1e-6)


@pytest.mark.parametrize(
    ("name", "p", "m"), [rest("zb-auto", 8, 450), whole("zb-auto", 12, 90), whole("v-auto", 6, 300), whole("v-auto", 12, 40)]
)
@examples(6)
@given(data=st.data())
def test_more_memory_makes_no_plan_longer_at_any_size(name: str, p: int, m: int, data: st.DataObject) -> None:
    """Above 10,000 passes, and below, where levels are searched in another way."""
    home = families.placement(name, p)
    stage = StageCosts(1, data.draw(st.sampled_from([1.0, 1.3, 2.0])), data.draw(st.sampled_from([0.5, 0.8, 1.0])))
    costs = Costs((stage.share(home.chunks),) * (home.last_stage + 1), data.draw(st.sampled_from([0.0, 0.1, 0.4])))
    limits = sorted(data.draw(st.lists(st.floats(0.5 * p, 3 * p), min_size=3, max_size=3)))
    plans = (planning.plan(name, p, m, costs, memory_limit=limit, objective="span") for limit in limits)
    spans = [simulate(plan, costs).span for plan in plans]
    assert all(more <= less * SLACK for less, more in pairwise(spans))


def test_twelve_microbatches_of_memory_are_no_worse_than_eleven() -> None:
    home = families.placement("v-auto", 12)
    costs = Costs((StageCosts(1, 1.2, 0.8).share(2),) * (home.last_stage + 1), 0.05)
    spans = [simulate(planning.plan("v-auto", 12, 160, costs, memory_limit=limit), costs).span for limit in (8, 11, 12, 14)]
    assert all(more <= less * SLACK for less, more in pairwise(spans))
    assert spans[-1] < spans[0]
