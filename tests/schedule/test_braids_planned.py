"""Planning with braids: never longer than without, within limits, above the bound, near the optimum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from marked import rest
from schedule.optima import stored
from schedule_strategies import with_parts_of

from megatron.pipeline.planner.planning.compose import solve
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.certify.certificate import certify
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, StageCosts
from megatron.pipeline.planner.schedule.core.passes import Kind, Offload, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved, linear, wave
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.traffic import of_programs
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound, own_bound
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.search.overlapped import list_schedule_overlapped
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.braid import combined


@pytest.mark.parametrize("name", ["zb-v", rest("v-half"), "dualpipe-v", "interleaved", rest("v-auto"), "gis", "1f1b", "zb-auto"])
def test_planned_with_braids_is_between_the_bound_and_without(name: str) -> None:
    request = Request(name, 4, 12, lambda placement: with_parts_of(placement.last_stage + 1), objective="span")
    plain, overlapping = request.plan(), replace(request, overlap=True).plan()
    verify(overlapping.schedule)
    assert overlapping.bound <= overlapping.timeline.span * (1 + 1e-9)
    assert overlapping.timeline.span <= plain.timeline.span
    assert overlapping.peak <= plain.peak * (1 + 1e-9) or name in ("v-auto", "zb-auto", "interleaved")
    assert plain.communication == pytest.approx((12 * 0.8 * len(plain.problem.costs.stages) / 4,) * 2)
    assert overlapping.communication[0] <= overlapping.communication[1] == plain.communication[1]
    if name in ("zb-v", "v-half", "dualpipe-v", "interleaved"):
        assert overlapping.braids > 0 and overlapping.communication[0] < plain.communication[0]
        assert overlapping.timeline.span < 0.97 * plain.timeline.span


@pytest.mark.rest
def test_a_schedule_of_many_passes_gets_braids() -> None:
    """From 500 passes on, changes of schedules without braids are compared by a compiled replay, which knows no braids."""
    request = Request("zb-v", 4, 24, lambda placement: with_parts_of(placement.last_stage + 1), overlap=True)
    planned = request.plan()
    assert planned.braids > 0 and sum(map(len, replace(request, overlap=False).plan().schedule.passes)) > 500


def test_megatrons_combined_order() -> None:
    """The first backward of a rank runs with the forward after it, and so on; a rank holds a chunk more."""
    costs = with_parts_of(8)
    plain = Request("interleaved", 4, 8, costs, 2).plan()
    order = combined(plain.schedule)
    assert order is not None
    verify(order)
    row, own = order.passes[0], plain.schedule.passes[0]
    warm = next(slot for slot, work in enumerate(row) if work.kind is Kind.FBW)
    assert warm == next(slot for slot, work in enumerate(own) if work.kind is Kind.BW) + 1
    assert row[warm - 1] == next(work for work in own[warm:] if work.kind is Kind.F)
    assert sum(work.kind is Kind.FBW for work in row) == 16 - (warm - 1) and row[-1] == own[-1]
    peaks = [max(activation_peaks(one, costs)) for one in (order, plain.schedule)]
    assert peaks[0] == peaks[1] + 1
    assert combined(Request("zb-v", 4, 8).plan().schedule) is None
    chosen = Request("interleaved", 4, 8, costs, 2, overlap=True).plan()
    assert chosen.timeline.span <= min(simulate(one, costs).span for one in (order, plain.schedule))
    within = Request("interleaved", 4, 8, costs, 2, plain.peak, overlap=True).plan()
    assert within.peak == plain.peak


def test_without_parts_they_are_assumed() -> None:
    planned = Request("dualpipe-v", 4, 12, overlap=True).plan()
    assert any(row.is_braided for row in planned.schedule.rows)
    assert planned.timeline.span < Request("dualpipe-v", 4, 12).plan().timeline.span


@examples(40)
@given(st.data())
def test_orders_made_of_braids_obey_rules_and_limits(data: st.DataObject) -> None:
    """For any limits with room for a microbatch on every stage, also where backwards are split, and on any placement."""
    ranks, chunks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    made = data.draw(st.sampled_from([interleaved, wave]))(ranks, chunks)
    dispatch = data.draw(st.sampled_from([0.0, 0.1, 0.3]))
    stage = StageCosts(
        1.0, 1.0, 1.0, 1.0, data.draw(st.sampled_from([0.0, 0.4, 1.0])), dispatch=dispatch, experts=0.4, combine=dispatch,
        backward_combine=dispatch, backward_experts=0.3, backward_dispatch=dispatch, weight_experts=0.5, layers=2,
    )  # fmt: skip
    room = data.draw(st.none() | st.floats(0, 3))
    limits = None if room is None else (chunks * (1 + room),) * ranks
    fused = frozenset(stage for stage in range(made.last_stage + 1) if data.draw(st.booleans()))
    costs = Costs((stage,) * (made.last_stage + 1), hop=data.draw(st.sampled_from([0.0, 0.2])))
    objective = data.draw(st.sampled_from(Objective))
    problem = Problem(made, data.draw(st.integers(1, 6)), costs, limits, objective, fused=fused, overlap=True)
    order = list_schedule_overlapped(problem)
    assert order is not None
    schedule = Schedule("paired", made, problem.microbatches, order)
    verify(schedule, costs, limits)
    assert own_bound(schedule, problem) <= problem.value(simulate(schedule, costs)) * (1 + 1e-9)
    if any(row.is_braided for row in schedule.rows):  # as one from a file, whose problem does not say that it may have braids
        assert own_bound(schedule, replace(problem, overlap=False)) == own_bound(schedule, problem)
    certificate = certify(of_programs(schedule, lower(schedule, costs)), costs)
    assert certificate.unlimited == pytest.approx(simulate(schedule, costs).makespan)


@pytest.mark.parametrize(
    ("name", "changes", "whole"),
    [
        ("v-half", {"offload": Offload.FULL}, 8 * 0.8),
        ("zb-h1", {"vocabulary": Vocabulary.ONE_BARRIER}, 8 * 0.8),
        ("1f1b", {"recompute": frozenset(range(2))}, 8 * (0.8 + 0.4)),  # R communicates as F does
        ("seq-1f1b", {"splits": 2}, 8 * 0.8),
    ],
)
def test_what_is_exposed_is_what_passes_take_and_do_not_compute(name: str, changes: dict[str, Any], whole: float) -> None:
    def costs(placement: Placement) -> Costs:
        stages = tuple(replace(stage, recompute=stage.forward) for stage in with_parts_of(placement.last_stage + 1).stages)
        return Costs(tuple(stage.share(placement.chunks) for stage in stages), copies=CopyCosts(0.5, 0.5))

    plain = Request(name, 2, 8, costs, **changes).plan()
    assert plain.communication == pytest.approx((whole, whole))
    braided = Request(name, 2, 8, costs, overlap=True, **changes).plan()
    assert 0 < braided.communication[0] <= whole * (1 + 1e-9)
    assert braided.communication[0] < whole or not braided.braids


@pytest.mark.rest
def test_more_memory_makes_more_braids() -> None:
    """With room for DualPipeV's p + 1/2, and more, v-auto pairs more; it is never longer than DualPipeV where that fits."""
    asked = Request("v-auto", 4, 12, lambda placement: with_parts_of(placement.last_stage + 1), overlap=True)
    least, room = asked.plan(), replace(asked, memory_limit=9).plan()
    other = replace(asked, schedule="dualpipe-v").plan()
    assert room.timeline.span <= min(least.timeline.span, other.timeline.span) and room.peak <= 9 and room.braids > least.braids
    assert room.schedule.name == "v-auto"


def every_order(microbatches: int) -> Iterator[tuple[Pass, ...]]:
    """All orders of F and BW of one stage, with every choice of braids among neighbours."""
    for ahead in product((True, False), repeat=2 * microbatches):
        if sum(ahead) != microbatches or any(sum(ahead[:k]) < k - sum(ahead[:k]) for k in range(2 * microbatches + 1)):
            continue
        numbers = {True: iter(range(microbatches)), False: iter(range(microbatches))}
        row = [Pass(Kind.F if forward else Kind.BW, next(numbers[forward])) for forward in ahead]
        kinds, numbered = [work.kind for work in row], [work.microbatch for work in row]
        pairs = [at for at in range(1, len(row)) if kinds[at - 1 : at + 1] == [Kind.F, Kind.BW]]
        places = [at for at in pairs if numbered[at - 1] != numbered[at]]
        for chosen in product((True, False), repeat=len(places)):
            here = {at for at, taken in zip(places, chosen, strict=True) if taken}
            yield tuple(work._replace(kind=Kind.FBW) if at in here else work for at, work in enumerate(row))


@pytest.mark.parametrize("limit", [None, 2.0])
def test_planned_is_near_the_best_of_all_orders(limit: float | None) -> None:
    made, costs = linear(2), with_parts_of(2)
    problem = Problem(made, 3, costs, (limit,) * 2 if limit else None, Objective.MAKESPAN, fused=frozenset({0, 1}), overlap=True)
    best = math.inf
    for rows in product(list(every_order(3)), repeat=2):
        schedule = Schedule("any", made, 3, rows)
        with suppress(ScheduleError):
            verify(schedule, costs, problem.limits)
            best = min(best, problem.value(simulate(schedule, costs)))
    assert lower_bound(problem) <= best + 1e-9
    assert best - 1e-9 <= problem.value(simulate(solve("zb-auto", problem), costs)) <= 1.1 * best


@pytest.mark.parametrize("hop", [0.0, 0.5])
def test_the_makespan_begins_before_the_last_rank_does_and_ends_after_it(hop: float) -> None:
    """Where all backwards are fused, every rank's least seconds come between the ways to it and from it."""
    costs, fused = replace(with_parts_of(4), hop=hop), frozenset(range(4))
    problem = Problem(linear(4), 12, costs, (4.0,) * 4, Objective.MAKESPAN, fused=fused, overlap=True)
    pair, ways = sum(costs.braid(0, Kind.FBW, 0)), 3 * (1.0 + hop) + 3 * (2.0 + hop)
    assert lower_bound(problem) >= ways + 1.0 + 11 * pair + 2.0 - 1e-9
    assert lower_bound(replace(problem, objective=Objective.SPAN)) < lower_bound(problem)
    split = replace(problem, fused=frozenset())  # W of the last rank may run while the last gradient is on its way
    assert lower_bound(split) <= lower_bound(problem)


@pytest.mark.parametrize(("name", "microbatches", "limit"), [("zb-auto", 4, 3.0), ("v-auto", 3, None), ("v-auto", 3, 5.0)])
def test_planned_is_near_the_optimum(name: str, microbatches: int, limit: float | None) -> None:
    asked = Request(name, 2, microbatches, lambda placement: with_parts_of(placement.last_stage + 1), overlap=True)
    planned, best = (
        replace(asked, memory_limit=limit, objective="span").plan(),
        stored("braids")[f"{name} m={microbatches} limit={limit}"],
    )
    assert planned.bound <= best * (1 + 1e-9) and best * (1 - 1e-9) <= planned.timeline.span <= 1.1 * best
