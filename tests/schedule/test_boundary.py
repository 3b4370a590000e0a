"""What ranks do between two iterations: data, rules, simulated times, Megatron-LM's rules, plans and their bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.pipeline.planning.request import Request
from megatron.pipeline.schedule.core.boundary import Turn, completes, turn, turns, with_turns
from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.kinds import Kind, Lane
from megatron.pipeline.schedule.core.passes import Pass
from megatron.pipeline.schedule.core.problem import Objective, Problem
from megatron.pipeline.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.schedule.optimum.period import period_bound
from megatron.pipeline.schedule.rules.boundary import verify_boundary
from megatron.pipeline.schedule.rules.verify import verify
from megatron.pipeline.schedule.time.cycle import Cycle
from megatron.pipeline.schedule.time.simulate import activation_peaks
from megatron.pipeline.schedule.transforms.boundary import (
    MEGATRON,
    NO_OVERLAP,
    Rules,
    by_rules,
    megatron,
    waits_for_norm,
    with_boundary,
)

FAMILIES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "1f1b-v", "gis", "dualpipe-v", "dualpipe")


def planned(
    name: str, ranks: int, microbatches: int, goal: Objective = Objective.MAKESPAN, *, chunks: int | None = None, **costs: float
) -> tuple[Schedule, Problem]:
    """A family's schedule without a boundary, and its problem with what a rank does between two iterations."""
    plan = Request(name, ranks, microbatches, chunks=chunks, objective=goal).plan()
    between = {"reduce": 4.0, "step": 1.0, "gather": 2.0} | costs
    shared: dict[str, Any] = {field: between.pop(field) for field in ("hop", "latency", "norm") if field in between}
    parts = plan.problem.placement.chunks_per_replica
    own: dict[str, Any] = {field: value / parts for field, value in between.items()}
    stages = tuple(replace(stage, **own) for stage in plan.problem.costs.stages)
    return plan.schedule, replace(plan.problem, costs=replace(plan.problem.costs, stages=stages, **shared))


def passes(text: str) -> tuple[Pass, ...]:
    return tuple(map(Pass.parse, text.split()))


def one_stage(row: str, order: str = "F0.0 B0.0 W0.0 F1.0 B1.0 W1.0") -> Schedule:
    plain = Request("zb-h1", 1, 2).plan().schedule
    return replace(plain, passes=(passes(order),), boundary=(passes(row),))


def period(schedule: Schedule, costs: Costs, norm: bool) -> float:
    steady = Cycle(schedule, costs, norm).steady(turns(schedule))
    assert steady
    return steady.period


def reference(schedule: Schedule, given: Costs, norm: bool, iterations: int = 24) -> float:
    """The period, from the longest path through many iterations, written down once more without any of the simulator's code."""
    costs, rows = schedule.costs(given), turns(schedule)
    ends: dict[tuple[int, int, Pass], float] = {}
    home = {(rank, work): slot < own.late for rank, own in enumerate(rows) for slot, work in enumerate(own.passes)}
    counts = [{c: sum(w.kind is Kind.RS and w.chunk == c for w in own.passes) for c in range(9)} for own in rows]

    def seconds(rank: int, work: Pass) -> float:
        stage = schedule.placement.stages[rank][work.chunk]
        if work.kind.row.bucket:
            return costs.bucket_seconds(work.kind, stage, counts[rank][work.chunk])
        return costs.seconds(work.kind, stage)

    def needs(rank: int, at: int, work: Pass) -> Iterator[tuple[float, tuple[int, int, Pass]]]:
        """Results and what they take to arrive; ``at`` is the iteration in whose turn the rank has the pass."""
        boundary = at - home[rank, work]
        if work.kind is Kind.OPT:
            yield 0.0, (rank, boundary, work._replace(kind=Kind.RS))
            for other, own in enumerate(rows) if norm else ():
                for each in own.passes:
                    if each.kind is Kind.RS:
                        yield costs.norm, (other, boundary, each)
        if work.kind is Kind.AG:
            yield (
                0.0,
                (rank, at - (home[rank, work] and not home[rank, work._replace(kind=Kind.OPT)]), work._replace(kind=Kind.OPT)),
            )
        if work.kind.is_forward:
            for each in rows[rank].passes:
                if each.kind is Kind.AG and each.chunk == work.chunk:
                    yield 0.0, (rank, at - (not home[rank, each]), each)
        for other, need in () if work.kind.row.bucket else schedule.predecessors(rank, work):
            yield costs.hop * (other != rank), (other, at, need)

    for at in range(iterations):
        left = {(rank, slot) for rank, own in enumerate(rows) for slot in range(len(own.passes))}
        while left:
            before = len(left)
            for rank, slot in sorted(left):
                own = rows[rank].passes
                work = own[slot]
                on_lane = work.kind.row.lane is Lane.REPLICAS
                computed = [(rank, at, each) for each in own[:slot] if each.kind.row.lane is None][-1:]
                computed = computed or [(rank, at - 1, each) for each in own if each.kind.row.lane is None][-1:]
                lane = [(rank, at, each) for each in own[:slot] if each.kind.row.lane] if on_lane else []
                lane = lane[-1:] or ([(rank, at - 1, each) for each in own if each.kind.row.lane][-1:] if on_lane else [])
                wanted = [*((0.0, each) for each in computed + lane), *needs(rank, at, work)]
                if all(each[1] < 0 or each in ends for _, each in wanted):
                    start = max((ends[each] + hop for hop, each in wanted if each[1] >= 0), default=0.0)
                    ends[rank, at, work] = start + seconds(rank, work)
                    left.discard((rank, slot))
            assert len(left) < before, "ranks wait for each other"
    first = rows[0].passes[0]
    last, half = (ends[0, at, first] for at in (iterations - 1, iterations // 2))
    return (last - half) / (iterations - 1 - iterations // 2)


def test_a_boundary_is_data() -> None:
    schedule, _ = planned("zb-v", 4, 8)
    row = passes("RS0.1 W7.0 RS0.0 OPT0.0 AG0.0 F0.0 OPT0.1 AG0.1")
    whole = replace(schedule, boundary=(row, *(passes("RS0.0 RS0.1 OPT0.0 OPT0.1 AG0.0 AG0.1"),) * 3))
    verify(whole)
    assert Schedule.from_json(whole.to_json()) == whole == with_turns(whole, turns(whole))
    assert "boundary" not in schedule.fields() and schedule.boundary == ()
    own = turn(whole.passes[0], row)
    assert own and [str(work) for work in own.passes[: own.late]] == ["F0.0", "OPT0.1", "AG0.1"]
    assert whole.forward_only().boundary == ()
    with pytest.raises(ValueError, match="boundary must be a list of passes per rank"):
        Schedule.from_json(whole.to_json().replace('"boundary": [[', '"boundary": [3, ['))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("RS0.0 OPT0.0", "AG0.0 is missing"),
        ("OPT0.0 AG0.0", "RS0.0 is missing"),
        ("RS0.0 RS1.0 OPT0.0 OPT1.0 AG1.0", "AG0.0 is missing"),
        ("RS0.0 OPT0.0 AG0.0 AG0.0", "AG0.0 is in the boundary 2 times"),
        ("RS0.0 OPT0.0 AG0.0 AG3.0", "AG3.0 is of an unknown bucket"),
        ("RS0.0 RS0.1 OPT0.0 AG0.0", "RS0.1 is of an unknown bucket"),
        ("OPT0.0 RS0.0 AG0.0", "OPT0.0 runs before RS0.0"),
        ("RS0.0 AG0.0 OPT0.0", "AG0.0 runs before OPT0.0"),
        ("RS0.0 W1.0 OPT0.0 AG0.0", "RS0.0 runs before W1.0, which adds to its gradients"),
        ("F0.0 RS0.0 OPT0.0 AG0.0", "RS0.0 runs in the next iteration"),
        ("RS0.0 OPT0.0 F0.0 AG0.0", "AG0.0 runs after F0.0, which uses its parameters"),
        ("RS0.0 B1.0 OPT0.0 AG0.0", "the boundary is of other passes than the iteration"),
    ],
)
def test_the_first_broken_rule_is_named(row: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"rank 0: .*{message}"):
        verify(one_stage(row))


def test_a_step_before_the_norm_needs_post_validation() -> None:
    early = replace(planned("zb-v", 4, 8)[0], boundary=(passes("RS0.1 OPT0.1 AG0.1 RS0.0 OPT0.0 AG0.0"),) * 4)
    early = replace(
        early, passes=tuple(tuple(sorted(row, key=lambda each: (each.kind is Kind.W) * (2 - each.chunk))) for row in early.passes)
    )
    verify_boundary(early)
    with pytest.raises(ScheduleError, match=r"rank 0: OPT0\.1 runs before RS0\.0, and waits for the norm"):
        verify_boundary(early, waits_for_norm=True)
    assert Cycle(early, planned("zb-v", 4, 8)[1].costs, True).steady(turns(early)) is None


def test_passes_between_iterations_are_in_the_boundary_alone() -> None:
    schedule = one_stage("RS0.0 OPT0.0 AG0.0")
    with pytest.raises(ScheduleError, match=r'RS0\.0 runs between two iterations; it belongs into "boundary"'):
        verify(replace(schedule, passes=((*schedule.passes[0], Pass(Kind.RS, 0)),), boundary=()))
    with pytest.raises(ScheduleError, match="a boundary of 2 ranks for a placement of 1"):
        verify(replace(schedule, boundary=schedule.boundary * 2))


def test_times_by_hand() -> None:
    """One rank: 6 of passes, then RS 4, the norm 1, OPT 1 and AG 2; two buckets overlap the second OPT with the first AG."""
    schedule, problem = planned("zb-h1", 1, 2, norm=1.0)
    whole = replace(schedule, boundary=(passes("RS0.0 OPT0.0 AG0.0"),))
    assert period(whole, problem.costs, True) == 6 + 4 + 1 + 1 + 2
    assert period(whole, problem.costs, False) == 6 + 4 + 1 + 2
    halves = replace(schedule, boundary=(passes("RS0.0 RS1.0 OPT0.0 AG0.0 OPT1.0 AG1.0"),))
    assert period(halves, problem.costs, True) == 6 + 4 + 1 + 0.5 + 2
    slow = replace(problem.costs, latency=0.25)
    assert period(halves, slow, True) == 6 + 4.5 + 1 + 0.5 + 2.5
    shown = Cycle(halves, problem.costs, True).timeline(turns(halves))
    assert [str(each.work) for each in shown.copies[0][:4]] == ["RS0.0", "RS1.0", "AG0.0", "AG1.0"]
    assert shown.ranks[0][0].start == 0 and len(shown.ranks[0]) == 2 * (6 + 2)


@given(
    name=st.sampled_from(FAMILIES[:-1]), ranks=st.integers(2, 4), rounds=st.integers(1, 2), goal=st.sampled_from(Objective),
    between=st.tuples(*[st.integers(0, 12)] * 6),
)  # fmt: skip
@examples(25)
def test_simulation_is_the_longest_path(name: str, ranks: int, rounds: int, goal: Objective, between: tuple[int, ...]) -> None:
    reduce, step, gather, norm, latency, hop = (number / 4 for number in between)
    schedule, problem = planned(
        name, ranks, rounds * ranks, goal, reduce=reduce, step=step, gather=gather, norm=norm, latency=latency, hop=hop
    )
    made, _ = with_boundary(schedule, problem)
    for whole in (made, with_turns(schedule, by_rules(schedule, MEGATRON[1], 2))):
        found = period(whole, problem.costs, waits_for_norm(problem))
        assert found == pytest.approx(reference(whole, problem.costs, waits_for_norm(problem)), rel=1e-6)


@given(
    name=st.sampled_from(FAMILIES), ranks=st.integers(2, 5), microbatches=st.integers(1, 12), goal=st.sampled_from(Objective),
    between=st.tuples(*[st.floats(0, 20)] * 3), norm=st.floats(0, 2), latency=st.floats(0, 1), hop=st.floats(0, 1),
)  # fmt: skip
@examples(40)
def test_a_plan_is_between_its_bound_and_megatrons_rules(
    name: str, ranks: int, microbatches: int, goal: Objective, between: tuple[float, float, float], norm: float, latency: float,
    hop: float,
) -> None:  # fmt: skip
    reduce, step, gather = between
    try:
        schedule, problem = planned(
            name, ranks, microbatches, goal, reduce=reduce, step=step, gather=gather, norm=norm, latency=latency, hop=hop
        )
    except ValueError:
        assume(False)
    made, rules = with_boundary(schedule, problem)
    verify(made)
    verify_boundary(made, waits_for_norm(problem))
    found = period(made, problem.costs, waits_for_norm(problem))
    assert period_bound(made, problem) <= found * (1 + 1e-9)
    assert found <= rules * (1 + 1e-9)
    assert rules == megatron(schedule, problem)[1].period
    for before, after in zip(*(activation_peaks(each, problem.costs) for each in (schedule, made)), strict=True):
        assert after <= before * (1 + 1e-9)


def test_megatrons_rules() -> None:
    schedule, _ = planned("zb-v", 4, 4)
    plain, aligned, none = (
        with_turns(schedule, by_rules(schedule, rules, 1)) for rules in (Rules(), Rules(align_grad_reduce=True), NO_OVERLAP)
    )
    for each in (plain, aligned, none):
        verify(each)
        verify_boundary(each, waits_for_norm=True)
    for own in turns(plain):
        for chunk in (0, 1):
            last = max(slot for slot, work in enumerate(own.passes) if completes(work.kind) and work.chunk == chunk)
            assert own.passes[last + 1] == Pass(Kind.RS, 0, chunk)
    assert plain.boundary[0] == aligned.boundary[0]
    for row in (*aligned.boundary[1:], *none.boundary):
        assert [work.kind for work in row] == [Kind.RS] * 2 + [Kind.OPT] * 2 + [Kind.AG] * 2
    # The third chunk's gather starts with the first pass of the second.
    four, _ = planned("interleaved", 2, 4, chunks=4)
    row = with_turns(four, by_rules(four, Rules(), 1)).boundary[0]
    assert row.index(Pass(Kind.AG, 0, 1)) < row.index(Pass(Kind.F, 0, 0)) < row.index(Pass(Kind.AG, 0, 2))
    assert row.index(Pass(Kind.AG, 0, 2)) + 1 == row.index(Pass(Kind.F, 0, 1))


def test_a_v_gains_with_few_microbatches_and_a_single_chunk_little() -> None:
    def gain(name: str) -> float:
        schedule, problem = planned(name, 8, 8, reduce=8.0, step=1.0, gather=4.0, norm=0.5)
        made, rules = with_boundary(schedule, problem)
        return 1 - period(made, problem.costs, True) / rules

    assert gain("zb-v") > 0.1
    assert 0 < gain("1f1b") < 0.02  # of one chunk buckets can overlap step and gather, and nothing else


def every_turn(own: tuple[Pass, ...]) -> Iterator[Turn]:
    """All turns of a rank with these passes and one bucket per chunk, whose steps follow all passes in the order of use."""
    last = {each.chunk: slot for slot, each in enumerate(own) if completes(each.kind)}
    steps = tuple(Pass(kind, 0, chunk) for chunk in sorted(last) for kind in (Kind.OPT, Kind.AG))
    for order in itertools.permutations(last):
        for places in itertools.product(*(range(last[chunk] + 1, len(own) + 1) for chunk in order)):
            if list(places) == sorted(places):
                made: list[Pass] = []
                for slot in range(len(own) + 1):
                    made += [Pass(Kind.RS, 0, chunk) for place, chunk in zip(places, order, strict=True) if place == slot]
                    made += own[slot : slot + 1]
                yield Turn((*made, *steps))


@pytest.mark.parametrize("goal", list(Objective))
@pytest.mark.parametrize(("reduce", "step", "gather"), [(4.0, 1.0, 2.0), (1.0, 0.5, 6.0), (8.0, 3.0, 0.5)])
def test_tiny_plans_are_exact_optima(goal: Objective, reduce: float, step: float, gather: float) -> None:
    """Two ranks, two chunks each, one microbatch: every order of W, every order and place of RS."""
    schedule, problem = planned("zb-v", 2, 1, goal, reduce=reduce, step=step, gather=gather, norm=0.5)
    norm = waits_for_norm(problem)
    cycle, best = Cycle(schedule, problem.costs, norm), float("inf")
    choices = []
    for row in schedule.passes:
        orders = {
            order
            for order in itertools.permutations(row)
            if [each for each in order if each.kind is not Kind.W] == [each for each in row if each.kind is not Kind.W]
            and all(order.index(each) > order.index(each._replace(kind=Kind.B)) for each in row if each.kind is Kind.W)
        }
        choices.append([each for order in sorted(orders) for each in every_turn(order)])
    for both in itertools.product(*choices):
        steady = cycle.steady(both)
        best = min(best, steady.period if steady else best)
    made, _ = with_boundary(schedule, problem)
    whole = period(made, problem.costs, norm)
    assert whole <= best * (1 + 1e-9)  # several buckets may be shorter still
