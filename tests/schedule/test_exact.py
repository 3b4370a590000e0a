"""The exact optimum: against every schedule there is on tiny instances, and against what is known to be the best."""

import itertools

import pytest
from schedule import exact, optima
from schedule.exact import optimum

from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import linear, v
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate


def best_of_all(problem: Problem) -> float:
    """The least value among every order of split passes of one chunk per rank."""
    works = [Pass(kind, m) for m in range(problem.microbatches) for kind in (Kind.F, Kind.B, Kind.W)]
    orders = []
    for order in itertools.permutations(works):
        at = {work: place for place, work in enumerate(order)}
        if all(at[a] < at[b] for a, b in itertools.combinations(works, 2) if a.kind == b.kind or a.microbatch == b.microbatch):
            orders.append(order)
    best = float("inf")
    for rows in itertools.product(orders, repeat=problem.ranks):
        schedule = Schedule("any", problem.placement, problem.microbatches, rows)
        try:
            timeline = simulate(schedule, problem.costs)
        except ValueError:
            continue
        peaks = activation_peaks(schedule, problem.costs)
        if problem.limits is None or all(peak <= limit for peak, limit in zip(peaks, problem.limits, strict=True)):
            best = min(best, problem.value(timeline))
    return best


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("limits", [None, (2, 1), (2.5, 1.5)])
@pytest.mark.parametrize("retained", [0, 0.5, 1])
def test_the_optimum_is_the_best_of_all_schedules(
    objective: Objective, limits: tuple[float, ...] | None, retained: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "lower_bound", lambda problem: 0)  # the search alone
    stages = (StageCosts(2, 1, 1.5, 1, retained), StageCosts(1, 2.5, 1, 1, retained))
    problem = Problem(linear(2), 2, Costs(stages, 0.25), limits, objective)
    found = optimum(problem)
    assert found.proven
    assert found.value == found.bound == best_of_all(problem)
    verify(found.schedule, problem.costs, problem.limits)


def test_everything_a_problem_can_hold() -> None:
    stages = tuple(StageCosts(1, 2, 1, 1, 0.5, fused, 1, 0.25) for fused in (None, 2.5, 2, None))
    for placement, options in (
        (linear(4), {"recompute": frozenset({1, 3}), "fused": frozenset({0})}),
        (linear(4), {"splits": 2}),
        (v(2), {"recompute": frozenset({2})}),
        (v(2), {"objective": Objective.MAKESPAN}),
    ):
        problem = Problem(placement, 2, Costs(stages, 0.5), (2.5,) * placement.ranks, **options)  # type: ignore[arg-type]
        found = optimum(problem, seconds=20)
        verify(found.schedule, problem.costs, problem.limits)
        assert lower_bound(problem) <= found.bound <= found.value
        assert found.proven
        assert found.proven == (found.bound == found.value)
        kinds = {(problem.placement.stage(rank, work.chunk), work.kind) for rank, row in enumerate(found.schedule.passes)
                 for work in row}  # fmt: skip
        assert {stage for stage, kind in kinds if kind is Kind.R} == problem.recompute
        assert {stage for stage, kind in kinds if kind is Kind.BW} >= problem.fused


@pytest.mark.parametrize(
    "case",
    [case if number < 4 else pytest.param(case, marks=pytest.mark.whole) for number, case in enumerate(optima.CASES)],
    ids=str,
)
def test_the_stored_optima_are_proven_again(case: optima.Case) -> None:
    assert optima.proven(case) == pytest.approx(optima.stored()[str(case)], rel=1e-9)
