"""The lower bound, against random schedules of any problem, and those that are known to be best."""

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import exact, links_of, placements

from megatron.pipeline.planner import planning, solve
from megatron.pipeline.planner.schedule.core import link_costs
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Offload, Pass
from megatron.pipeline.planner.schedule.core.placement import Placement, linear, v
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.optimum import bound
from megatron.pipeline.planner.schedule.rules.verify import per_rank, verify
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate


def lower_bound(placement: Placement, microbatches: int, costs: Costs, memory_limit: Any = None) -> float:
    limits = None if memory_limit is None else tuple(per_rank(memory_limit, placement.ranks))
    return bound.lower_bound(Problem(placement, microbatches, costs, limits))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Anything a problem can hold: slices, R, BW (also shorter than B and W), stages of different sizes."""
    placement = draw(placements())
    count = placement.last_stage + 1
    times = st.sampled_from([0, 1, 1, 2, 3, 5]).map(exact)
    stages = []
    for _ in range(count):
        size = draw(st.sampled_from([0, 1, 1, 2, 3]))
        parts = [size * draw(st.sampled_from([0, exact(1, 2), 1])) for _ in range(2)]
        fused = draw(st.one_of(st.none(), times))
        stages.append(StageCosts(draw(times), draw(times), draw(times), exact(size), parts[0], fused, draw(times), parts[1]))
    some, hops = st.frozensets(st.integers(0, count - 1)), st.sampled_from([exact(0), exact(0), exact(1, 2), exact(2)])
    return Problem(
        placement,
        draw(st.integers(1, 6)),
        Costs(tuple(stages), draw(hops), links=draw(links_of(placement.ranks, hops))),
        objective=draw(st.sampled_from(Objective)),
        recompute=draw(st.one_of(st.just(frozenset()), some)),
        fused=draw(st.one_of(st.just(frozenset()), some)),
        splits=draw(st.sampled_from([1, 1, 2, 3])),
    )


def any_schedule(problem: Problem, generator: random.Random) -> Schedule:
    """A schedule of the problem, made by running passes that can run in a random order, deep or broad by chance."""
    empty = Schedule("any", problem.placement, problem.microbatches, ((),) * problem.ranks, problem.splits)
    turns = {False: list(range(empty.slices)), True: []}
    for first in range(0, empty.slices, problem.splits):
        turns[True] += reversed(range(first, first + problem.splits))
    waiting: list[list[list[Pass]]] = []  # by rank: every chunk's F, and its R, its B and BW, its W and BW, in their order
    everything: list[set[Pass]] = []
    for row in problem.placement.stages:
        waiting.append([])
        for chunk, stage in enumerate(row):
            forward, backward = turns[False], turns[True]
            fused = {number for number in backward if stage in problem.fused or generator.random() < 0.3}
            waiting[-1].append([Pass(Kind.F, number, chunk) for number in forward])
            if stage in problem.recompute:
                waiting[-1].append([Pass(Kind.R, number, chunk) for number in backward])
            for split in (Kind.B, Kind.W):
                waiting[-1].append([Pass(Kind.BW if number in fused else split, number, chunk) for number in backward])
        everything.append({work for line in waiting[-1] for work in line})
    whole = replace(empty, passes=tuple(map(tuple, everything)))
    done: list[list[Pass]] = [[] for _ in waiting]
    eager = generator.choice([0.5, 1, 4, 20])  # how much a rank prefers what comes later in a microbatch
    while True:
        runnable = []
        for rank, rows in enumerate(waiting):
            for work in {line[0] for line in rows if line}:
                in_turn = all(line[0] == work for line in rows if work in line)
                if in_turn and all(before in done[other] for other, before in whole.predecessors(rank, work)):
                    runnable.append((rank, work))
        if not runnable:
            break
        weights = [eager if work.kind is not Kind.F else 1 for _, work in runnable]
        rank, work = generator.choices(sorted(runnable), weights)[0]
        done[rank].append(work)
        for line in waiting[rank]:
            if work in line:
                line.remove(work)
    return replace(empty, passes=tuple(map(tuple, done)))


@examples(50)
@given(problems(), st.integers(0, 2**32))
def test_no_random_schedule_of_any_problem_is_below_the_bound(problem: Problem, seed: int) -> None:
    schedule = any_schedule(problem, random.Random(seed))
    verify(schedule)
    value = problem.value(simulate(schedule, problem.costs))
    assert bound.lower_bound(problem) <= value * (1 + 1e-9)
    peaks = tuple(activation_peaks(schedule, problem.costs))
    limited = replace(problem, limits=peaks)
    assert bound.lower_bound(limited) <= value * (1 + 1e-9)
    slower = tuple(link._replace(latency=link.latency + 1) for link in problem.costs.links)
    assert bound.lower_bound(limited) <= bound.lower_bound(replace(limited, costs=replace(problem.costs, links=slower))) + 1e-9


@pytest.mark.parametrize("hop", [0, exact(1, 4), exact(1, 2)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (2, 7), (4, 5), (4, 8), (8, 20)])
def test_zb_h1_is_the_best_there_is_at_its_memory(ranks: int, microbatches: int, hop: Any) -> None:
    for f, b, w in ((1, 1, 1), (3, 4, 2), (2, 1, 2)):
        costs = uniform(linear(ranks), exact(f), exact(b), exact(w), hop, exact(1), exact(1))
        span = simulate(planning.plan("zb-h1", ranks, microbatches), costs).span
        assert lower_bound(linear(ranks), microbatches, costs, memory_limit=ranks) == span


@pytest.mark.parametrize(("link", "seconds"), [("1to2", 5), ("2to1", 5), ("1-2", 10)])
def test_one_microbatch_at_a_time_takes_its_way_there_and_back(link: str, seconds: int) -> None:
    costs = replace(uniform(linear(4)), links=tuple(link_costs.read(link, 5)))
    assert lower_bound(linear(4), 8, costs, memory_limit=1) == 8 * (9 + seconds)


def test_zb_h2_needs_no_more_than_the_work_where_nothing_is_lost_on_hops() -> None:
    costs = uniform(linear(4))
    assert lower_bound(linear(4), 8, costs) == simulate(planning.plan("zb-h2", 4, 8), costs).span == 24


def test_little_memory_bounds_the_number_of_microbatches_on_their_way() -> None:
    # With room for one microbatch, each makes its whole way before the next starts: 8 * (4F + 4B + W).
    assert lower_bound(linear(4), 8, uniform(linear(4)), memory_limit=1) == 8 * 9


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_more_memory_than_can_be_filled_is_no_limit(microbatches: int) -> None:
    costs = uniform(linear(4), forward=3, retained=0.25)
    assert lower_bound(linear(4), microbatches, costs, memory_limit=100) == lower_bound(linear(4), microbatches, costs)


def test_without_room_for_one_microbatch_nothing_runs() -> None:
    assert lower_bound(linear(2), 4, uniform(linear(2)), memory_limit=0.5) == float("inf")


def v_bound(ranks: int, microbatches: int, limit: int) -> float:
    """The idle time of a V in passes of one chunk, all equal, with memory for ``limit`` microbatches."""
    return 2 * (lower_bound(v(ranks), microbatches, uniform(v(ranks)), memory_limit=limit) - 3 * microbatches)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 12, 16, 64])
def test_v_half_is_optimal(ranks: int) -> None:
    # Qi et al., "Pipeline Parallelism with Controllable Memory": 3p-7 for even p, 3p-4 for odd, at (p+2)//2 microbatches.
    assert v_bound(ranks, 3 * ranks, (ranks + 2) // 2) == max(0, 3 * ranks - (4 if ranks % 2 else 7))


@pytest.mark.parametrize("ranks", [3, 4, 6, 7, 9, 10, 16])
def test_v_min_is_optimal_where_its_memory_is_used(ranks: int) -> None:
    # 4p-5, or 4p-7 where 3 divides p, at (p+4)//3 microbatches; with p = 2 modulo 3 some of that memory is spare.
    assert v_bound(ranks, 3 * ranks, (ranks + 4) // 3) == 4 * ranks - (5 if ranks % 3 else 7)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_zb_v_needs_no_more_than_the_work(ranks: int) -> None:
    assert v_bound(ranks, 3 * ranks, ranks) == 0


def test_where_backwards_are_fused_the_bound_is_that_of_1f1b() -> None:
    for ranks, microbatches in ((2, 6), (4, 12), (8, 24)):
        problem = Problem(linear(ranks), microbatches, uniform(linear(ranks), 1, 1.5, 0.5), (float(ranks),) * ranks)
        fused = replace(problem, fused=frozenset(range(ranks)))
        span = simulate(planning.plan("1f1b", ranks, microbatches), problem.costs).span
        assert bound.lower_bound(problem) < bound.lower_bound(fused) == span


def test_the_makespan_counts_the_way_to_every_rank() -> None:
    problem = Problem(linear(4), 8, uniform(linear(4)), (4.0,) * 4, Objective.MAKESPAN)
    assert bound.lower_bound(problem) == simulate(planning.plan("zb-h1", 4, 8), problem.costs).makespan
    one = replace(problem, microbatches=1)
    assert bound.lower_bound(one) == 4 + 4 + 1


def test_recomputation_needs_less_memory_and_more_time() -> None:
    stage = StageCosts(1, 1, 1, recompute=1, checkpoint=0.25)
    problem = Problem(v(2), 6, Costs((stage,) * 4), (1.25, 1.25), recompute=frozenset(range(4)))
    assert bound.least_limit(problem, 0) == 1.25
    assert 6 * 8 <= bound.lower_bound(problem) < float("inf")
    assert bound.lower_bound(replace(problem, recompute=frozenset())) == float("inf")


def test_slices_of_a_microbatch_are_held_together() -> None:
    problem = Problem(linear(2), 4, uniform(linear(2)), (1.0, 1.0), splits=4)
    assert bound.least_limit(problem, 1) == 1
    assert 12 < bound.lower_bound(problem) < float("inf")
    assert bound.lower_bound(replace(problem, limits=(1.0, 0.75))) == float("inf")


@pytest.mark.parametrize("copies", [0.0, 0.5, 4.0])
def test_no_schedule_with_copies_is_below_what_its_memory_allows(copies: float) -> None:
    """Copies that take long free little: then the memory that passes alone need makes the pipeline longer than their work."""
    costs = replace(uniform(linear(4)), copies=CopyCosts(copies, copies))
    request = planning.Request("zb-auto", 4, 16, costs, memory_limit=2.0, offload=Offload.FULL)
    problem = request.problem()
    least, alone = bound.memory_bound(problem), bound.memory_bound(replace(problem, offload=None))
    assert least <= alone <= bound.lower_bound(replace(problem, offload=None)) * (1 + 1e-9)
    assert least == alone if copies == 4 else least < alone
    with suppress(ValueError):  # copies of that pace may not suffice
        assert least <= problem.value(simulate(solve("zb-auto", problem), costs)) * (1 + 1e-9)
