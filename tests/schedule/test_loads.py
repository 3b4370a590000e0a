"""Microbatches of unequal lengths: costs of each, and plans for them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from schedule.optima import stored
from schedule_strategies import links_of, with_parts_of

from megatron.pipeline.planner.planning import Request
from megatron.pipeline.planner.planning.every_batch import ordered, pack
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.link_costs import LinkCosts
from megatron.pipeline.planner.schedule.core.loads import Load, loads_of
from megatron.pipeline.planner.schedule.core.passes import Kind, Offload, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.program import Compute
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.rules.verify import verify, verify_programs
from megatron.pipeline.planner.schedule.time.orders import Orders, Reordered
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.view import render

SLACK = 1 + 1e-9


def some_loads(generator: random.Random, count: int) -> tuple[Load, ...]:
    return tuple(Load(*(generator.uniform(0.2, 4) for _ in Load._fields)) for _ in range(count))


def some_seconds(generator: random.Random) -> tuple[float, float, float]:
    forward, backward, weight = (generator.uniform(1, 2) for _ in range(3))
    return forward, backward, weight


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Any family, at unequal stages and microbatches, with one thing that can be asked for on top of it."""
    name = draw(st.sampled_from([*families.FAMILIES]))
    family = families.named(name)
    ranks, microbatches = draw(st.sampled_from([2, 4])), draw(st.integers(1, 9))
    generator = random.Random(draw(st.integers(0, 2**32)))
    placement = families.placement(name, ranks)
    stages = tuple(
        StageCosts(*some_seconds(generator), retained=generator.choice([0.5, 1]), recompute=1.0) for _ in range(placement.depth)
    )
    costs = Costs(stages, generator.choice([0, 0.3]), copies=CopyCosts(0.3, 0.3), loads=some_loads(generator, microbatches))
    costs = replace(costs, links=draw(links_of(ranks, st.sampled_from([0, 0.3, 3]))))
    options: dict[str, object] = {}
    ask = draw(st.sampled_from(["nothing", "vocabulary", "offload", "recompute", "fused", "overlap"]))
    if ask == "vocabulary" and family.splits == 1:
        options = {"vocabulary": draw(st.sampled_from(Vocabulary))}
        costs = replace(costs, vocabulary=replace(costs.vocabulary, S=0.4, T=0.3, activation=0.1))
    elif ask == "offload" and family.splits == 1:
        options = {"offload": draw(st.sampled_from(Offload))}
    elif ask == "recompute":
        options = {"recompute": range(len(stages))}
    elif ask == "fused":
        options = {"fused": range(0, len(stages), 2)}
    elif ask == "overlap" and family.splits == 1:
        parts = with_parts_of(len(stages)).stages[0]
        options, costs = {"overlap": True}, replace(costs, stages=(parts,) * len(stages))
    objective = draw(st.sampled_from(Objective))
    return Request(name, ranks, microbatches, costs, objective=objective, quick=draw(st.booleans()), **options)  # type: ignore[arg-type]


@examples(120)
@given(requests(), st.sampled_from([None, 1.0, 0.6]))
def test_every_plan_keeps_the_rules_the_limits_and_the_bound(request: Request, share: float | None) -> None:
    costs = request.costs
    assert isinstance(costs, Costs)
    if share:
        free = request.plan()
        request = replace(request, memory_limit=[share * peak for peak in free.peaks])
    try:
        planned = request.plan()
    except LimitTooLow:
        assert share
        return
    verify(planned.schedule, planned.problem.costs, planned.problem.limits)
    verify_programs(planned.schedule, planned.programs)
    peaks = activation_peaks(planned.schedule, planned.problem.costs)
    if share:
        assert all(peak <= limit * SLACK for peak, limit in zip(peaks, planned.problem.limits or (), strict=True))
    assert planned.bound <= planned.value * SLACK
    works = [step.work for program in planned.programs for step in program if isinstance(step, Compute)]
    assert {work.microbatch for work in works} == set(range(planned.schedule.slices))


@examples(60)
@given(requests())
def test_loads_of_one_plan_what_none_plan(request: Request) -> None:
    """Equal microbatches have one plan; a search that is told of unequal ones looks at other levels of memory."""
    costs = request.costs
    assert isinstance(costs, Costs)
    request = replace(request, quick=True)
    ones = replace(request, costs=replace(costs, loads=(Load(),) * request.microbatches)).plan()
    none = replace(request, costs=replace(costs, loads=())).plan()
    assert ones.schedule.passes == none.schedule.passes
    assert ones.timeline == none.timeline and ones.peaks == none.peaks


def test_costs_of_tokens_are_linear_and_quadratic_within_each_sequence() -> None:
    assert loads_of([[100], [50, 50], [200]], 100) == (Load(), Load(), Load(2, 2, 2, 2, 2))
    long, halves, double = loads_of([[100], [50, 50], [200]], 100, attention=0.5)
    assert long == Load()
    assert halves.forward == 0.5 + 0.25 and halves.backward == pytest.approx((0.5 + 0.5) / 1.5)
    assert double.forward == 1 + 2 and double.weight == double.memory == double.tokens == 2
    wrongs: list[list[list[int]]] = [[], [[]], [[0]], [[-1]]]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="give"):
            loads_of(wrong)


def test_a_pass_takes_its_load_and_a_message_its_tokens() -> None:
    loads = (Load(2, 3, 4, 5, 6), Load(1, 1, 1, 1, 1))
    costs = Costs((StageCosts(1, 10, 100),) * 2, hop=0.5, loads=loads)
    planned = Request("1f1b", 2, 2, costs).plan()
    times = {(rank, str(timed.work)): timed for rank, row in enumerate(planned.timeline.ranks) for timed in row}
    assert times[0, "F0.0"].end == 2 and times[1, "F0.0"].start == 2 + 0.5 * 6
    assert times[1, "BW0.0"].end - times[1, "BW0.0"].start == 3 * 10 + 4 * 100
    assert times[0, "BW1.0"].end - times[0, "BW1.0"].start == 110
    assert planned.peaks == [6, 5]


def test_drawings_show_passes_as_long_as_they_take() -> None:
    costs = Costs((StageCosts(1, 1, 1),) * 2, loads=loads_of([[3], [1]], 1))
    drawn = render(Request("1f1b", 2, 2, costs).plan().timeline, 200)
    first, second = (len(found) for found in re.findall(r"F\d-*", drawn)[:2])
    assert first == 3 * second


def test_loads_are_checked_and_read_back() -> None:
    costs = replace(uniform(linear(2)), loads=(Load(1, 2, 3, 4, 5), Load()))
    assert Costs.from_json(costs.to_json()) == costs
    with pytest.raises(ValueError, match="loads of 2 microbatches for 3"):
        Problem(linear(2), 3, costs)
    with pytest.raises(ValueError, match="loads of 2 microbatches for 3"):
        simulate(Schedule("own", linear(2), 3, ((Pass(Kind.F, 0),), ())), costs)
    with pytest.raises(ValueError, match="microbatch 1 must be numbers above 0"):
        replace(costs, loads=(Load(), Load(0)))
    for wrong in ([1], [[1, 2]], [[1, 1, 1, 1, "x"]], 5):
        with pytest.raises(ValueError, match="loads"):
            Costs.from_json(json.dumps(costs.fields() | {"loads": wrong}))


@examples(40)
@given(st.sampled_from(["zb-h1", "zb-v", "1f1b", "gis"]), st.integers(0, 2**32))
def test_compiled_replays_of_other_orders_are_the_simulation(name: str, seed: int) -> None:
    generator = random.Random(seed)
    ranks, many = generator.choice([2, 4]), generator.randint(1, 8)
    ways = (LinkCosts(1, 0, generator.choice([0.5, 3.0]), 0.25),)
    costs = replace(uniform(families.placement(name, ranks), 1, 1.2, 0.8, 0.1), loads=some_loads(generator, many), links=ways)
    planned = Request(name, ranks, many, replace(costs, loads=(), links=()), quick=True).plan()
    problem = replace(planned.problem, costs=costs, limits=(2.0,) * ranks)
    order = generator.sample(range(many), many)
    other = replace(costs, loads=tuple(costs.loads[number] for number in order))
    import numpy as np

    lengths, excess = Reordered(planned.schedule, problem).lengths(np.array(order))
    timeline = simulate(planned.schedule, other)
    rounded = pytest.approx((timeline.span, timeline.makespan), rel=1e-12)  # of messages that stand in line
    assert (lengths.span, lengths.makespan) == rounded
    assert excess == pytest.approx(max(1.0, max(activation_peaks(planned.schedule, other)) / 2))
    again = Orders(planned.schedule, other).lengths(planned.schedule)
    assert (again.span, again.makespan) == rounded


SMALL = (("zb-auto", 2, 4), ("zb-auto", 3, 3), ("v-auto", 2, 3), ("zb-auto", 2, 5))


def test_small_plans_and_their_bounds_are_near_the_optimum() -> None:
    """Of memory as much as 1F1B's, less and more; B frees some of it, or none."""
    generator, near, optima = random.Random(5), [], iter(stored("loads"))
    for share in (0.7, 0.8, 1.0, 1.3):
        for family, ranks, microbatches in SMALL:
            placement, lengths = (
                families.placement(family, ranks),
                [[generator.choice([1, 2, 3, 6])] for _ in range(microbatches)],
            )
            costs = replace(uniform(placement, 2, 3, 2), loads=loads_of(lengths, 2))
            retained = generator.choice([0.5, 1])
            costs = replace(costs, stages=tuple(replace(cost, retained=retained * cost.activation) for cost in costs.stages))
            request = Request(family, ranks, microbatches, costs, objective=generator.choice([*Objective]))
            limits = tuple(max(share * limit, 3.0) for limit in request.problem().limits or ())
            planned = replace(request, memory_limit=limits).plan()
            best, bound = next(optima), lower_bound(planned.problem)
            assert bound <= best * SLACK, (share, family, lengths)
            assert best / SLACK <= planned.value <= 1.03 * best, (share, family, lengths)
            near.append(bound / best)
    assert min(near) > 0.85 and sum(near) / len(near) > 0.98


@pytest.mark.parametrize(("name", "most"), [("zb-auto", 1.03), ("zb-v", 1.15)])
def test_the_bound_counts_what_unequal_microbatches_hold(name: str, most: float) -> None:
    """Not their area alone, which leaves 8 ranks a third more time than the bound."""
    generator = random.Random(1)
    loads = loads_of([[int(generator.lognormvariate(6, 1)) + 1 for _ in range(3)] for _ in range(32)], attention=0.1)
    costs = replace(uniform(families.placement(name, 8), 1, 1.2, 0.8), loads=loads)
    planned = Request(name, 8, 32, costs, objective="makespan", quick=True).plan()
    assert planned.bound <= planned.value <= most * planned.bound


def test_another_order_is_never_longer_and_keeps_the_limits() -> None:
    generator = random.Random(5)
    for name in ("zb-auto", "v-auto", "1f1b"):
        lengths = [[int(generator.lognormvariate(6, 1)) + 1 for _ in range(3)] for _ in range(12)]
        costs = replace(uniform(families.placement(name, 4), 1, 1.2, 0.8), loads=loads_of(lengths, attention=0.2))
        request = Request(name, 4, 12, costs, objective="makespan", quick=True)
        given, any_order = request.plan(), ordered(request)
        assert any_order.value <= given.value * SLACK
        assert any_order.order and sorted(any_order.order) == list(range(12))
        assert any_order.problem.costs.loads == tuple(costs.loads[number] for number in any_order.order)
        verify(any_order.schedule, any_order.problem.costs, given.problem.limits)
        assert ordered(request).order == any_order.order
    assert any_order.value < 0.95 * given.value  # 1F1B waits for the longest everywhere
    with pytest.raises(ValueError, match="keeps the order of its microbatches"):
        ordered(replace(request, schedule="seq-1f1b"))


def first_fit(sequences: list[int], tokens: int, replicas: int) -> list[list[list[int]]]:
    """In the order given, each where there is room; microbatches go to replicas in turn."""
    bins: list[list[int]] = []
    for place, length in enumerate(sequences):
        fits = (own for own in bins if sum(sequences[at] for at in own) + length <= tokens)
        own = next(fits, None)
        if own is None:
            bins.append(own := [])
        own.append(place)
    return [bins[replica::replicas] for replica in range(replicas)]


def test_packing_takes_less_time_than_first_fit() -> None:
    generator, tokens, attention = random.Random(11), 4096, 0.3
    shorter = []
    for replicas in (1, 2, 4):
        sequences = [min(tokens, int(generator.lognormvariate(6.5, 1)) + 1) for _ in range(60)]
        request = Request("zb-auto", 4, 8, uniform(families.placement("zb-auto", 4), 1, 1.2, 0.8), objective="makespan")
        packed = pack(sequences, tokens, 4, replicas, attention)
        assert sorted(place for own in packed for microbatch in own for place in microbatch) == list(range(60))
        assert len({len(own) for own in packed}) == 1 and len(packed) == replicas
        assert all(sum(sequences[place] for place in microbatch) <= tokens for own in packed for microbatch in own)

        def seconds(packed: list[list[list[int]]], sequences: list[int] = sequences, request: Request = request) -> float:
            values = []
            for own in packed:
                loads = loads_of([[sequences[at] for at in microbatch] for microbatch in own], tokens, attention)
                costs = request.costs
                assert isinstance(costs, Costs)
                asked = replace(request, microbatches=len(own), costs=replace(costs, loads=loads), quick=True)
                values.append(asked.plan().value)
            return max(values)

        shorter.append(seconds(packed) / seconds(first_fit(sequences, tokens, replicas)))
    assert sum(shorter) / len(shorter) < 0.96


@pytest.mark.parametrize(
    ("sequences", "tokens", "replicas", "reason"),
    [
        ([], 10, 1, "no microbatch: give the lengths"),
        ([5, 0], 10, 1, "sequences of [0] tokens: give whole numbers of at least 1"),
        ([20, 5], 10, 1, "do not go into microbatches of 10 tokens, as many for each of 1 replicas: give room for 20 tokens"),
        ([5, 5], 10, 3, "do not go into microbatches of 10 tokens, as many for each of 3 replicas"),
        ([5, 5], 10, 0, "0 replicas: give at least 1"),
        ([5, 5], 0, 1, "give tokens above 0"),
    ],
)
def test_what_cannot_be_packed_is_refused(sequences: list[int], tokens: int, replicas: int, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        pack(sequences, tokens, 4, replicas)
