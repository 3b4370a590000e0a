"""What ranks do between two iterations: data, rules, simulated times, Megatron-LM's rules, plans and their bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from schedule_strategies import links_of

from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.boundary import Turn, completes, turn, turns, with_turns, within
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import Kind, Lane
from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.optimum.period import period_bound
from megatron.pipeline.planner.schedule.rules.boundary import verify_boundary
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.time.cycle import Cycle
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks
from megatron.pipeline.planner.schedule.transforms.boundary import (
    MEGATRON,
    Rules,
    by_rules,
    megatron,
    waits_for_norm,
    with_boundary,
)

FAMILIES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "1f1b-v", "gis", "dualpipe-v")


def planned(
    name: str, ranks: int, microbatches: int, goal: Objective = Objective.MAKESPAN, *, chunks: int | None = None, **costs: Any
) -> tuple[Schedule, Problem]:
    """A family's schedule without a boundary, and its problem with what a rank does between two iterations."""
    plan = Request(name, ranks, microbatches, chunks=chunks, objective=goal).plan()
    between = {"reduce": 4.0, "step": 1.0, "gather": 2.0} | costs
    shared: dict[str, Any] = {field: between.pop(field) for field in ("hop", "links", "latency", "norm") if field in between}
    parts = plan.problem.placement.chunks
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


def reference(schedule: Schedule, given: Costs, norm: bool, iterations: int = 24) -> float:  # noqa: PLR0915 - one text
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

    def beside(rank: int, work: Pass) -> Pass | None:
        """The pass within which RS or AG begins: the chunk's last one behind it, or its first one before it."""
        own, step = rows[rank].passes, 1 if work.kind is Kind.RS else -1
        at = own.index(work)
        while 0 <= at < len(own) and own[at].kind.row.bucket:
            at += step
        of_chunk = [e for e in own if e.chunk == work.chunk and (completes(e.kind) if step == 1 else e.kind.is_forward)]
        return own[at] if 0 <= at < len(own) and own[at] == of_chunk[-1 if step == 1 else 0] else None

    def needs(rank: int, at: int, work: Pass) -> Iterator[tuple[float, tuple[int, int, Pass]]]:
        """Results and what they take to arrive; ``at`` is the iteration in whose turn the rank has the pass."""
        boundary = at - home[rank, work]
        if work.kind is Kind.OPT:
            yield 0.0, (rank, boundary, work._replace(kind=Kind.RS))
            for other, own in enumerate(rows) if norm else ():
                for each in own.passes:
                    if each.kind is Kind.RS:
                        yield costs.norm, (other, boundary, each)
        if work.kind is Kind.RS and (last := beside(rank, work)):
            yield -seconds(rank, last) * work.microbatch / counts[rank][work.chunk], (rank, at, last)
        if work.kind is Kind.AG:
            step = work._replace(kind=Kind.OPT)
            yield 0.0, (rank, at - (home[rank, work] and not home[rank, step]), step)
        for other, need in () if work.kind.row.bucket else schedule.predecessors(rank, work):
            yield costs.message(other, rank), (other, at, need)

    def gathered(rank: int, at: int, work: Pass) -> Iterator[tuple[float, tuple[int, int, Pass]]]:
        """Every AG of a chunk whose first pass this is, and how much of the pass remains when it must be there."""
        own, count = rows[rank].passes, counts[rank][work.chunk]
        if work == next((each for each in own if each.kind.is_forward and each.chunk == work.chunk), None):
            for each in own:
                if each.kind is Kind.AG and each.chunk == work.chunk:
                    yield seconds(rank, work) * (count - each.microbatch) / count, (rank, at - (not home[rank, each]), each)

    begins: dict[tuple[int, int, Pass], float] = {}
    for at in range(iterations):
        left = {(rank, slot) for rank, own in enumerate(rows) for slot in range(len(own.passes))}
        while left:
            before = len(left), len(begins)
            for rank, slot in sorted(left):
                own = rows[rank].passes
                work = own[slot]
                key = rank, at, work
                on_lane = work.kind.row.lane is Lane.REPLICAS
                asked = beside(rank, work) if work.kind is Kind.AG else None
                computed = [(rank, at, each) for each in own[:slot] if each.kind.row.lane is None and each != asked][-1:]
                computed = computed or [(rank, at - 1, each) for each in own if each.kind.row.lane is None][-1:]
                lane = [(rank, at, each) for each in own[:slot] if each.kind.row.lane] if on_lane else []
                lane = lane[-1:] or ([(rank, at - 1, each) for each in own if each.kind.row.lane][-1:] if on_lane else [])
                wanted = [*((0.0, each) for each in computed + lane), *needs(rank, at, work)]
                begun = asked is None or (rank, at, asked) in begins
                if begun and all(each[1] < 0 or each in ends for _, each in wanted):
                    started = [begins[rank, at, asked]] if asked else []
                    begins[key] = max([*started, *(ends[each] + hop for hop, each in wanted if each[1] >= 0)], default=0.0)
                awaited = list(gathered(rank, at, work))
                if key in begins and all(each[1] < 0 or each in ends for _, each in awaited):
                    there = [ends[each] + rest for rest, each in awaited if each[1] >= 0]
                    ends[key] = max([begins[key] + seconds(rank, work), *there])
                    left.discard((rank, slot))
            assert (len(left), len(begins)) != before, "ranks wait for each other"
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
        ("RS0.0 B1.0 W1.0 OPT0.0 AG0.0", "RS0.0 runs before W1.0, which adds to its gradients"),
        ("F0.0 RS0.0 OPT0.0 AG0.0", "RS0.0 runs before W1.0, which adds to its gradients"),
        ("RS0.0 OPT0.0 F0.0 B0.0 AG0.0", "AG0.0 runs after F0.0, which uses its parameters"),
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
    """One rank: 6 of passes, then RS 4, the norm 1, OPT 1 and AG 2; two buckets overlap the second OPT with the first AG, and
    half of F, which takes 1, with the second AG."""
    schedule, problem = planned("zb-h1", 1, 2, norm=1.0)
    whole = replace(schedule, boundary=(passes("RS0.0 OPT0.0 AG0.0"),))
    assert period(whole, problem.costs, True) == 6 + 4 + 1 + 1 + 2
    assert period(whole, problem.costs, False) == 6 + 4 + 1 + 2
    halves = replace(schedule, boundary=(passes("RS0.0 RS1.0 OPT0.0 AG0.0 OPT1.0 AG1.0"),))
    assert period(halves, problem.costs, True) == 6 + 4 + 1 + 0.5 + 2 - 0.5
    slow = replace(problem.costs, latency=0.25)
    assert period(halves, slow, True) == 6 + 4.5 + 1 + 0.5 + 2.5 - 0.5
    early = replace(schedule, boundary=(passes("RS1.0 W1.0 RS0.0 OPT0.0 AG0.0 OPT1.0 AG1.0"),))  # half of W beside RS
    assert period(early, problem.costs, True) == 6 - 0.5 + 4 + 1 + 0.5 + 2 - 0.5
    asked = replace(schedule, boundary=(passes("RS0.0 RS1.0 OPT0.0 OPT1.0 F0.0 AG0.0 AG1.0"),))  # AG behind every step
    assert period(asked, problem.costs, True) == 6 + 4 + 1 + 1 + 2 - 0.5
    shown = Cycle(halves, problem.costs, True).timeline(turns(halves))
    assert [str(each.work) for each in shown.copies[0][:4]] == ["RS0.0", "RS1.0", "AG0.0", "AG1.0"]
    assert shown.ranks[0][0].start == 0 and len(shown.ranks[0]) == 2 * (6 + 2)


@given(
    name=st.sampled_from(FAMILIES[:-1]), ranks=st.integers(2, 4), rounds=st.integers(1, 2), goal=st.sampled_from(Objective),
    between=st.tuples(*[st.integers(0, 12)] * 6), data=st.data(),
)  # fmt: skip
@examples(12)
def test_simulation_is_the_longest_path(
    name: str, ranks: int, rounds: int, goal: Objective, between: tuple[int, ...], data: st.DataObject
) -> None:
    links = data.draw(links_of(ranks, st.sampled_from([0.0, 0.25, 1.5])))
    costs: dict[str, Any] = dict(
        zip(("reduce", "step", "gather", "norm", "latency", "hop"), (number / 4 for number in between), strict=True)
    )
    schedule, problem = planned(name, ranks, rounds * ranks, goal, links=links, **costs)
    made, _ = with_boundary(schedule, problem)
    for whole in (made, *(with_turns(schedule, by_rules(schedule, rules, 2)) for rules in MEGATRON)):
        found = period(whole, problem.costs, waits_for_norm(problem))
        assert found == pytest.approx(reference(whole, problem.costs, waits_for_norm(problem)), rel=1e-6)


@given(
    name=st.sampled_from(FAMILIES), ranks=st.integers(2, 5), microbatches=st.integers(1, 12), goal=st.sampled_from(Objective),
    between=st.tuples(*[st.floats(0, 20)] * 3), norm=st.floats(0, 2), latency=st.floats(0, 1), hop=st.floats(0, 1),
    data=st.data(),
)  # fmt: skip
@examples(40)
def test_a_plan_is_between_its_bound_and_megatrons_rules(
    name: str, ranks: int, microbatches: int, goal: Objective, between: tuple[float, float, float], norm: float, latency: float,
    hop: float, data: st.DataObject,
) -> None:  # fmt: skip
    costs: dict[str, Any] = dict(zip(("reduce", "step", "gather"), between, strict=True), norm=norm, latency=latency, hop=hop)
    links = data.draw(links_of(ranks, st.floats(0, 4)))
    try:
        schedule, problem = planned(name, ranks, microbatches, goal, links=links, **costs)
        made, rules = with_boundary(schedule, problem)
    except ValueError:
        assume(False)
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
        with_turns(schedule, by_rules(schedule, rules, 2)) for rules in (Rules(), Rules(aligned=True), Rules(False, False))
    )
    for each in (plain, aligned, none):
        verify(each)
        verify_boundary(each, waits_for_norm=True)
    # One bucket of a chunk, but for the first: RS within the last pass, AG with the first.
    for rank, own in enumerate(turns(plain)):
        begin = {str(work) for work in within(own.passes)}
        assert begin == {"AG0.0", "AG0.1", *(("RS1.0", "AG1.0") if rank == 0 else ())}
    assert [work.kind for work in none.boundary[3]] == [Kind.RS] * 2 + [Kind.OPT] * 2 + [Kind.AG] * 2
    # Aligned, RS of a chunk follow its last backward by as many others as there are ranks before.
    for rank, own in enumerate(turns(aligned)):
        assert not within(own.passes)
        finished = [work for work in own.passes if work.kind.finishes_weights or work.kind is Kind.RS]
        first = next(slot for slot, work in enumerate(finished) if work.kind is Kind.RS)
        own_last = max(slot for slot, work in enumerate(finished[:first]) if work.chunk == finished[first].chunk)
        assert first - own_last - 1 == min(rank, len(finished) - own_last - 3)
    # The third chunk's gather starts with the first pass of the second, on the second rank one pass earlier.
    four, _ = planned("interleaved", 2, 4, chunks=4)
    rows = [" ".join(map(str, row)) for row in with_turns(four, by_rules(four, Rules(aligned=True), 1)).boundary]
    assert rows[0].endswith("AG0.0 AG0.1 F0.0 F1.0 AG0.2 F0.1 F1.1 AG0.3")
    assert rows[1].endswith("AG0.0 AG0.1 F0.0 AG0.2 F1.0 F0.1 AG0.3")
    # One chunk: the first rank reduces within its last pass, and all gather with their first.
    single, _ = planned("1f1b", 2, 4)
    rows = [" ".join(map(str, row)) for row in with_turns(single, by_rules(single, Rules(aligned=True), 2)).boundary]
    assert rows == ["RS1.0 BW3.0 RS0.0 OPT0.0 OPT1.0 F0.0 AG1.0 AG0.0", "RS0.0 OPT0.0 F0.0 AG0.0"]


def test_short_iterations_gain() -> None:
    def gain(name: str, rules: Sequence[Rules] = MEGATRON) -> float:
        schedule, problem = planned(name, 8, 8, reduce=8.0, step=1.0, gather=4.0, norm=0.5)
        return 1 - period(with_boundary(schedule, problem)[0], problem.costs, True) / megatron(schedule, problem, rules)[1].period

    assert gain("zb-v") > 0.1
    assert gain("1f1b", [Rules()]) > 0.3  # every rank gathers after the one before it
    assert 0.02 < gain("1f1b") < 0.05  # of one chunk buckets overlap with the passes beside them, and nothing else


def test_an_optimizer_that_steps_in_one_piece_gathers_behind_all_steps() -> None:
    schedule, problem = planned("zb-v", 4, 8, step=2.0, gather=4.0)
    costs = replace(problem.costs, at_once=True)
    made, _ = with_boundary(schedule, replace(problem, costs=costs))
    for row in made.boundary:
        between = [each.kind for each in row if each.kind in (Kind.OPT, Kind.AG)]
        assert between == sorted(between, key=[Kind.OPT, Kind.AG].index) and len(between) >= 4
    assert period(made, costs, True) > 1.02 * period(with_boundary(schedule, problem)[0], costs, True)
    assert Costs.from_json(costs.to_json()) == costs != problem.costs
    with pytest.raises(ValueError, match="at_once: expected true or false"):
        Costs.from_json(costs.to_json().replace('"at_once": true', '"at_once": 3'))


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
