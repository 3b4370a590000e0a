"""The families against the specification and against their closed forms, which hold exactly."""

from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import costs_of, exact

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, Objective
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Posting
from megatron.pipeline.planner.schedule.rules.verify import verify, verify_programs
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate


@examples(250)
@given(st.sampled_from(sorted(families.FAMILIES)), st.data())
def test_every_family_obeys_the_rules_for_any_shape_and_costs(name: str, data: st.DataObject) -> None:
    family = families.FAMILIES[name]
    # What searches takes a second and more where it is large, and has a test of its own, with limits, R and BW.
    most_ranks, most_chunks, most_microbatches = (6, 4, 14) if family.memory is None else (3, 3, 6)
    microbatches = data.draw(st.integers(1, most_microbatches))
    ranks = data.draw(st.integers(1, most_ranks))
    chunks = data.draw(st.integers(family.least_chunks, most_chunks)) if family.any_chunks else family.chunks
    splits = data.draw(st.integers(1, 4)) if family.splits > 1 else None
    sizes = st.integers(ranks, 2 * ranks + 1) if family.fused else st.integers((ranks + 1) // 2, ranks)
    group = data.draw(sizes) if family.grouped else None
    costs = data.draw(costs_of(families.placement(name, ranks, chunks)))
    schedule = planning.plan(name, ranks, microbatches, costs, chunks, splits=splits, group=group)
    verify(schedule, costs, memory_limit=activation_peaks(schedule, costs))
    verify(schedule.forward_only(), costs, forward_only=True)
    verify_programs(schedule, lower(schedule, costs), Posting.BATCHED)


def span(name: str, p: int, m: int, f: int, b: int, w: int, c: Any) -> Any:
    costs = uniform(linear(p), exact(f), exact(b), exact(w), c)
    return simulate(planning.plan(name, p, m), costs).span


times = st.integers(1, 12)
hops = st.sampled_from([exact(0), exact(1, 3), exact(1), exact(2), exact(5)])
shapes = st.integers(1, 8)


@examples(100)
@given(shapes, st.integers(1, 20), times, times, times, hops)
def test_closed_form_of_1f1b(p: int, m: int, f: int, b: int, w: int, c: Any) -> None:
    if p == 1 or m % p:
        c = exact(0)
    hop_time = c * (exact(2 * (p - 1) * m, p) + 2 * (p - 2))
    assert span("1f1b", p, m, f, b, w, c) == (m + p - 1) * (f + b + w) + hop_time


@examples(100)
@given(shapes, st.integers(0, 15), times, times, st.data())
def test_closed_form_of_zb_h1(p: int, extra: int, f: int, b: int, data: st.DataObject) -> None:
    c = data.draw(hops)
    w = data.draw(st.integers(int(-(-2 * c // 1)), int(f + 2 * c)))
    m = p + extra + (1 if c else 0)
    assert span("zb-h1", p, m, f, b, w, c) == m * (f + b + w) + (p - 1) * (f + b - w) + 4 * (p - 1) * c


@examples(100)
@given(shapes, st.integers(0, 15), times, times, st.data())
def test_closed_form_of_zb_h2(p: int, extra: int, f: int, b: int, data: st.DataObject) -> None:
    c = data.draw(hops.filter(lambda c: bool(2 * c <= min(f, (f + b + 2 * c) / 2))))
    w = data.draw(st.integers(int(-(-2 * c // 1)), int(min(f, (f + b + 2 * c) / 2))))
    m = 2 * p - 1 + extra
    assert span("zb-h2", p, m, f, b, w, c) == m * (f + b + w) + (p - 1) * (f + b - 2 * w + 2 * c)


@given(shapes, st.integers(1, 8), times, times)
def test_closed_form_with_few_microbatches(p: int, m: int, f: int, b: int) -> None:
    """m <= p and W < B: Qi et al., appendix H."""
    m, w = min(m, p), max(1, min(f, b) - 1)
    if w < b:
        assert span("zb-h1", p, m, f, b, w, exact(0)) == (m + p - 1) * (f + b) + w


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_peaks_are_those_of_the_paper(p: int) -> None:
    m = 3 * p
    costs = uniform(linear(p), activation=exact(1), retained=exact(1, 3))

    def peaks(name: str) -> list[float]:
        return activation_peaks(planning.plan(name, p, m), costs)

    assert peaks("1f1b") == [p - r for r in range(p)]
    assert peaks("zb-h1") == [p - r + exact(r, 3) for r in range(p)]
    assert peaks("zb-h2") == [2 * (p - r) - 1 + exact(2 * r, 3) for r in range(p)]


@pytest.mark.parametrize(("m", "makespan"), [(1, 9), (3, 13), (4, 15), (8, 27)])
def test_without_interlocking_zb_h2_is_as_long_as_zb_h1(m: int, makespan: int) -> None:
    """Its own warm-up alone would take 16 with 4 microbatches."""
    found = [Request(name, 4, m, objective=Objective.MAKESPAN).plan().value for name in ("zb-h1", "zb-h2")]
    assert found == [makespan] * 2


@pytest.mark.parametrize("limit", [4, 4.5, 6, 7, 9])
def test_within_a_limit_zb_h2_is_never_longer_than_zb_h1(limit: float) -> None:
    """Without room for its warm-up it had been refused, or had named a limit that was refused, too."""
    h1, h2 = (Request(name, 4, 12, memory_limit=limit, objective="span").plan() for name in ("zb-h1", "zb-h2"))
    assert h2.peak <= limit and (h2.value < h1.value if limit >= 7 else h2.schedule.passes == h1.schedule.passes)


@pytest.mark.parametrize("limit", [1.0, 3.0, 4.9])
def test_a_limit_that_the_refusal_of_zb_h2_names_is_enough(limit: float) -> None:
    with pytest.raises(LimitTooLow) as refusal:
        Request("zb-h2", 5, 33, memory_limit=limit).plan()
    assert Request("zb-h2", 5, 33, memory_limit=refusal.value.least).plan().peak <= refusal.value.least


def test_zb_h1_on_four_ranks_by_hand() -> None:
    rows = [" ".join(str(work).removesuffix(".0") for work in row) for row in planning.plan("zb-h1", 3, 3).passes]
    assert rows == ["F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 F1 B0 F2 B1 W0 B2 W1 W2", "F0 B0 F1 B1 F2 B2 W0 W1 W2"]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_fused_says_whether_every_backward_is_one_pass(name: str) -> None:
    kinds = {str(work.kind) for row in planning.plan(name, 4, 8).passes for work in row}
    assert families.FAMILIES[name].fused == (kinds == {"F", "BW"})
