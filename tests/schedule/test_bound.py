"""The lower bound of the span, against every schedule there is on tiny instances, and against ZB-H1."""

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import costs_of, exact, schedules

from megatron.pipeline.schedule import bound, families
from megatron.pipeline.schedule.costs import Costs, StageCosts, uniform
from megatron.pipeline.schedule.passes import Kind, Pass
from megatron.pipeline.schedule.placement import Placement, interleaved, linear, v
from megatron.pipeline.schedule.problem import Problem
from megatron.pipeline.schedule.schedule import Schedule
from megatron.pipeline.schedule.simulate import activation_peaks, simulate
from megatron.pipeline.schedule.verify import per_rank


def lower_bound(placement: Placement, microbatches: int, costs: Costs, memory_limit: Any = None) -> float:
    limits = None if memory_limit is None else tuple(per_rank(memory_limit, placement.ranks))
    return bound.lower_bound(Problem(placement, microbatches, costs, limits))


@cache
def every_order(microbatches: int, chunks: int) -> list[tuple[Pass, ...]]:
    """Every order of one rank's split passes that keeps F before B before W, and B and W in microbatch order."""

    def extend(order: tuple[Pass, ...]) -> Iterator[tuple[Pass, ...]]:
        if len(order) == 3 * microbatches * chunks:
            yield order
        for work in (Pass(kind, m, c) for kind in (Kind.F, Kind.B, Kind.W) for m in range(microbatches) for c in range(chunks)):
            needed = []
            if work.kind is not Kind.F:
                needed.append(work._replace(kind=Kind.F if work.kind is Kind.B else Kind.B))
                needed += [work._replace(microbatch=m) for m in range(work.microbatch)]
            if work not in order and all(other in order for other in needed):
                yield from extend((*order, work))

    return list(extend(()))


CASES = {
    "one rank": (linear(1), 3, [(1, 2, 3)], 0),
    "equal": (linear(2), 2, [(1, 1, 1)] * 2, 0),
    "equal with hops": (linear(2), 2, [(1, 1, 1)] * 2, 1),
    "slow first": (linear(2), 2, [(3, 4, 2), (1, 1, 1)], 1),
    "slow last": (linear(2), 2, [(1, 1, 2), (2, 5, 1)], 0),
    "three ranks": (linear(3), 1, [(1, 2, 3), (3, 2, 1), (1, 1, 1)], 2),
    "v": (v(2), 1, [(1, 2, 3), (2, 1, 1), (1, 3, 1), (2, 2, 2)], 1),
    "interleaved": (interleaved(2, 2), 1, [(2, 1, 0), (1, 1, 4), (1, 0, 1), (0, 3, 1)], 1),
    "v on one rank": (v(1), 2, [(1, 2, 1), (3, 1, 2)], 1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("retained", [1, 0])
def test_no_schedule_is_below_the_bound(case: str, retained: int) -> None:
    placement, microbatches, times, hop = CASES[case]
    costs = Costs(tuple(StageCosts(*each, activation=1, retained=retained) for each in times), hop)
    orders = every_order(microbatches, placement.chunks)
    found: list[tuple[float, float]] = []
    for rows in itertools.product(orders, repeat=placement.ranks):
        schedule = Schedule("any", placement, microbatches, rows)
        try:
            found.append((simulate(schedule, costs).span, max(activation_peaks(schedule, costs))))
        except ValueError:
            continue
    for limit in (None, 1, 2, 3):
        best = min((span for span, peak in found if limit is None or peak <= limit), default=float("inf"))
        assert lower_bound(placement, microbatches, costs, limit) <= best


@given(st.data())
def test_no_random_schedule_is_below_the_bound(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule.placement))
    span, peaks = simulate(schedule, costs).span, activation_peaks(schedule, costs)
    assert lower_bound(schedule.placement, schedule.microbatches, costs) <= span
    assert lower_bound(schedule.placement, schedule.microbatches, costs, peaks) <= span


@pytest.mark.parametrize("hop", [0, exact(1, 4), exact(1, 2)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (2, 7), (4, 5), (4, 8), (8, 20)])
def test_zb_h1_is_the_best_there_is_at_its_memory(ranks: int, microbatches: int, hop: Any) -> None:
    for f, b, w in ((1, 1, 1), (3, 4, 2), (2, 1, 2)):
        costs = uniform(linear(ranks), exact(f), exact(b), exact(w), hop, exact(1), exact(1))
        span = simulate(families.plan("zb-h1", ranks, microbatches), costs).span
        assert lower_bound(linear(ranks), microbatches, costs, memory_limit=ranks) == span


def test_zb_h2_needs_no_more_than_the_work_where_nothing_is_lost_on_hops() -> None:
    costs = uniform(linear(4))
    assert lower_bound(linear(4), 8, costs) == simulate(families.plan("zb-h2", 4, 8), costs).span == 24


def test_little_memory_bounds_the_number_of_microbatches_on_their_way() -> None:
    # With room for one microbatch, each makes its whole way before the next starts: 8 * (4F + 4B + W).
    assert lower_bound(linear(4), 8, uniform(linear(4)), memory_limit=1) == 8 * 9


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_more_memory_than_can_be_filled_is_no_limit(microbatches: int) -> None:
    costs = uniform(linear(4), forward=3, retained=0.25)
    assert lower_bound(linear(4), microbatches, costs, memory_limit=100) == lower_bound(linear(4), microbatches, costs)


def test_without_room_for_one_microbatch_nothing_runs() -> None:
    assert lower_bound(linear(2), 4, uniform(linear(2)), memory_limit=0.5) == float("inf")


def test_costs_of_another_placement_are_refused() -> None:
    with pytest.raises(ValueError, match="costs of 2 stages for a placement of 4"):
        lower_bound(linear(4), 4, uniform(linear(2)))
