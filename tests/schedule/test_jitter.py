"""Span and makespan under random durations, against the simulator and against one scalar simulation per draw."""

import math
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from schedule_strategies import costs_of, parse, schedules

from megatron.pipeline import planning
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import Costs, uniform
from megatron.pipeline.schedule.core.passes import STAGE_KINDS, Kind, Pass
from megatron.pipeline.schedule.core.placement import linear, v
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.time.jitter import expected, factors
from megatron.pipeline.schedule.time.simulate import simulate
from megatron.pipeline.schedule.transforms.transform import fuse, recompute


def as_floats(costs: Costs) -> Costs:
    """The costs without fractions; halves and whole numbers lose nothing."""
    stages = (
        replace(stage, forward=float(stage.forward), backward=float(stage.backward), weight=float(stage.weight))
        for stage in costs.stages
    )
    return Costs(tuple(stages), float(costs.hop))


def one_draw(schedule: Schedule, costs: Costs, jitter: float, draws: int, draw: int) -> tuple[float, float]:
    """(span, makespan) of one draw, by asking for every pass again and again until its needs are met."""
    costs = costs.sliced(schedule.splits)
    ends: dict[tuple[int, Pass], float] = {}
    begins = [math.inf] * schedule.ranks
    free = [0.0] * schedule.ranks
    while len(ends) < sum(map(len, schedule.passes)):
        for rank, passes in enumerate(schedule.passes):
            for work in passes:
                needs = list(schedule.predecessors(rank, work))
                before = passes[: passes.index(work)]
                if (rank, work) in ends or any(need not in ends for need in [*needs, *((rank, w) for w in before)]):
                    continue
                stage = schedule.placement.stage(rank, work.chunk)
                factor = factors(work.kind, stage, schedule.slices, jitter, draws, 0)[work.microbatch, draw]
                arrivals = [ends[need] + (costs.hop if need[0] != rank else 0) for need in needs]
                start = max([free[rank], *arrivals])
                begins[rank] = min(begins[rank], start)
                free[rank] = ends[rank, work] = start + costs.stages[stage].seconds(work.kind) * factor
    return max(np.subtract(free, begins)), max(free) - min(begins)


@examples(60)
@given(st.data())
def test_without_jitter_it_is_the_simulation(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = as_floats(data.draw(costs_of(schedule.placement)))
    timeline, found = simulate(schedule, costs), expected(schedule, costs, 0, draws=3)
    assert found.spans.tolist() == [timeline.span] * 3
    assert found.makespans.tolist() == [timeline.makespan] * 3
    assert (found.span, found.makespan) == (timeline.span, timeline.makespan)


@examples(40)
@given(st.data(), st.sampled_from([0.1, 0.3, 2.0]))
def test_every_draw_is_a_simulation_with_its_factors(data: st.DataObject, jitter: float) -> None:
    schedule = data.draw(schedules())
    costs = as_floats(data.draw(costs_of(schedule.placement)))
    compare_with_one_draw(schedule, costs, jitter)


def compare_with_one_draw(schedule: Schedule, costs: Costs, jitter: float) -> None:
    found = expected(schedule, costs, jitter, draws=2)
    for draw in range(2):
        span, makespan = one_draw(schedule, costs, jitter, 2, draw)
        assert found.spans[draw] == pytest.approx(span, rel=1e-12)
        assert found.makespans[draw] == pytest.approx(makespan, rel=1e-12)


def test_recomputed_fused_sliced_and_replicated_passes() -> None:
    hops = uniform(linear(3), 1, 2, 1, 0.5)
    costs = replace(hops, stages=tuple(replace(stage, recompute=0.75, fused=2.5) for stage in hops.stages))
    mixed = recompute(fuse(planning.plan("zb-h1", 3, 4), {1}), {0, 1})
    assert {work.kind for row in mixed.passes for work in row} == set(STAGE_KINDS)
    compare_with_one_draw(mixed, costs, 0.3)
    compare_with_one_draw(mixed.forward_only(), costs, 0.3)
    compare_with_one_draw(planning.plan("seq-1f1b", 3, 3), costs, 0.3)
    for name in ("chimera", "dualpipe", "dualpipe-v"):
        home = families.placement(name, 4)
        compare_with_one_draw(planning.plan(name, 4, 8), uniform(home, 1, 2, 1, 0.5), 0.3)


def late(draws: NDArray[np.float64]) -> float:
    """The 95th percentile."""
    return float(np.quantile(draws, 0.95))


@pytest.mark.parametrize(("name", "m"), [("1f1b", 12), ("zb-h2", 12), ("interleaved", 8), ("seq-1f1b", 6), ("gis", 8)])
def test_jitter_costs_time(name: str, m: int) -> None:
    costs = uniform(families.placement(name, 4), 1, 1.2, 0.8, 0.05)
    schedule = planning.plan(name, 4, m, costs)
    found = [expected(schedule, costs, jitter, draws=1000) for jitter in (0, 0.1, 0.3, 1)]
    for less, more in pairwise(found):
        assert less.span < more.span and less.makespan < more.makespan
        assert late(less.spans) < late(more.spans) and late(less.makespans) < late(more.makespans)
    assert all(
        one.span < late(one.spans) and one.makespan < late(one.makespans) and one.span <= one.makespan for one in found[1:]
    )


def test_one_rank_takes_on_average_what_the_costs_say() -> None:
    costs = uniform(linear(1), 1, 2, 1)
    found = expected(planning.plan("zb-h1", 1, 100), costs, 0.3, draws=400)
    assert found.span == pytest.approx(400, rel=2e-3)
    assert found.spans.std() == pytest.approx(0.3 * math.sqrt(100 * (1 + 4 + 1)), rel=0.1)


@pytest.mark.parametrize("jitter", [0.1, 0.3, 1.0])
def test_factors_have_their_mean_and_deviation_and_are_never_negative(jitter: float) -> None:
    found = factors(Kind.B, 2, 1000, jitter, 200, 0)
    assert found.min() > 0
    assert found.mean() == pytest.approx(1, rel=0.01)
    assert found.std() == pytest.approx(jitter, rel=0.05)


def test_the_same_pass_has_the_same_luck_in_every_schedule() -> None:
    costs = uniform(linear(2))
    alone, other = (Schedule(name, linear(2), 2, parse("F0 F1", row)) for name, row in (("a", "F0 F1"), ("b", "F1 F0")))
    first, same, others = (expected(s, costs, 0.3, seed=seed) for s, seed in ((alone, 0), (alone, 0), (alone, 1)))
    assert first.spans.tolist() == same.spans.tolist() != others.spans.tolist()
    assert (expected(other, costs, 0.3).makespans >= first.makespans).all()
    assert factors(Kind.F, 0, 2, 0.3, 5, 0).tolist() != factors(Kind.F, 1, 2, 0.3, 5, 0).tolist()


def test_nothing_to_run_takes_no_time() -> None:
    empty = Schedule("empty", v(2), 1, ((), ()))
    assert expected(empty, uniform(v(2)), 0.1, draws=2).spans.tolist() == [0, 0]


def test_a_hundred_draws_of_a_large_schedule_are_quick() -> None:
    schedule, costs = planning.plan("zb-h1", 16, 128), uniform(linear(16))
    begin = time.process_time()
    expected(schedule, costs, 0.1)
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1,), "jitter is a share of a pass's duration, 0 to 10, such as 0.1 for 10 %; got -0.1"),
        ((math.nan,), "got nan"),
        ((11,), "got 11"),
        ((0.1, 0), "1 to 10000 draws, got 0"),
        ((0.1, 10**9), "1 to 10000 draws, got 1000000000"),
        ((0.1, 10, -1), "a seed must be a whole number of at least 0, got -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expected(planning.plan("1f1b", 2, 2), uniform(linear(2)), *arguments)


def test_costs_of_other_stages_and_stuck_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="costs of 3 stages for a placement of 2"):
        expected(planning.plan("1f1b", 2, 2), uniform(linear(3)), 0.1)
    with pytest.raises(ValueError, match=r"rank 1 is stuck at F0\.0"):
        expected(Schedule("late", linear(2), 1, parse("", "F0")), uniform(linear(2)), 0.1)
