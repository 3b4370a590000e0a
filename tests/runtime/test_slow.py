"""Slow ranks and links are found from reports: a link is no late sender, a rank no long batch, and noise is neither."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.monitor.recorder import Record, Waited
from megatron.pipeline.monitor.report import Report
from megatron.pipeline.monitor.slow import (
    ENTER,
    FEWEST,
    LASTING,
    LEAVE,
    LONGEST,
    Excess,
    Gauge,
    Thing,
    Verdict,
    added,
    taken,
    things,
)
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.costs import Costs, uniform
from megatron.pipeline.planner.schedule.core.cutting import evened
from megatron.pipeline.planner.schedule.core.loads import Load
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Compute, Message, Wait
from megatron.pipeline.planner.schedule.time.simulate import simulate


def report_of(schedule: Schedule, costs: Costs, clocks: Sequence[float] = (0.0,) * 4, knows_loads: bool = True) -> Report:
    """As ranks would record an iteration that takes what costs say.

    Args:
        clocks: of the ranks, beside the true time.
    """
    timeline, stages = simulate(schedule, costs), schedule.placement.stages
    sends = {
        Message(work.kind.row.sends, work.microbatch, stages[rank][work.chunk]): (rank, end)
        for rank, row in enumerate(timeline.ranks)
        for work, _, end in row
        if work.kind.row.sends
    }
    ranks = []
    for rank, (program, row) in enumerate(zip(lower(schedule, costs), timeline.ranks, strict=True)):
        ends, waits = {work: end for work, _, end in row}, []
        now = 0.0
        for one in program:
            now = ends[one.work] if isinstance(one, Compute) else now
            if isinstance(one, Wait) and isinstance(one.message, Message):
                sender, sent = sends[one.message]
                there = max(now, sent + costs.of(one.message.microbatch).message(sender, rank))
                waits.append(Waited(one.message, now + clocks[rank], there + clocks[rank]))
        passes = tuple(Timed(work, start + clocks[rank], end + clocks[rank]) for work, start, end in row)
        ranks.append(Record(passes, tuple(waits), (0,) * len(row), 0))
    return Report(tuple(ranks), schedule, costs.loads if knows_loads else ())


class Watched:
    """A pipeline whose iterations are watched; without hosts."""

    def __init__(self, name: str = "zb-h1", ranks: int = 4, microbatches: int = 8, works: Sequence[int] = ()) -> None:
        self.schedule = Request(name, ranks, microbatches).plan().schedule
        self.costs = replace(uniform(self.schedule.placement), hop=0.1)
        self.gauge, self.verdicts = Gauge(ranks, works), {thing: Verdict() for thing in things(ranks)}

    def iteration(self, report: Report) -> list[Thing]:
        """Things that change."""
        found = taken(report, self.costs)
        excess = self.gauge.excess(found, self.slow())
        _, shares = added(self.costs, self.schedule, excess)
        self.gauge.learn(found, self.slow(), [thing for thing, share in shares.items() if share > LEAVE])
        return [thing for thing, share in shares.items() if self.verdicts[thing].take(share, excess[thing])]

    def slow(self) -> dict[Thing, Excess]:
        return {thing: one.excess for thing, one in self.verdicts.items() if one.share}

    def slowed(self, ranks: dict[int, float] | None = None, links: dict[tuple[int, int], float] | None = None) -> Costs:
        return self.costs.slowed(self.schedule.placement, ranks or {}, links or {})


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "1f1b", "interleaved"])
@pytest.mark.parametrize("what", [1, (1, 2)])
def test_what_becomes_slow_is_named_after_three_iterations_and_when_it_is_over(name: str, what: Thing) -> None:
    watched = Watched(name)
    slow = watched.slowed({what: 1.4}) if isinstance(what, int) else watched.slowed(links={what: 2.0, what[::-1]: 3.0})
    clocks = (5.0, -3.0, 100.0, 0.25)
    assert not any(watched.iteration(report_of(watched.schedule, watched.costs, clocks)) for _ in range(8))
    changes = [watched.iteration(report_of(watched.schedule, slow, clocks)) for _ in range(20)]
    assert [number for number, change in enumerate(changes, 1) if change] == [LASTING] and changes[LASTING - 1] == [what]
    assert watched.slow()[what] == pytest.approx((0.4, 0.0) if isinstance(what, int) else (2.0, 3.0))
    changes = [watched.iteration(report_of(watched.schedule, watched.costs, clocks)) for _ in range(20)]
    assert [number for number, change in enumerate(changes, 1) if change] == [LASTING] and not watched.slow()


def test_a_rank_that_is_late_makes_no_link_slow_nor_another_rank() -> None:
    watched = Watched()
    for _ in range(8):
        watched.iteration(report_of(watched.schedule, watched.costs))
    for _ in range(6):
        watched.iteration(report_of(watched.schedule, watched.slowed({0: 3.0})))
    assert watched.slow() == {0: pytest.approx((2.0, 0.0))}


def test_a_clock_that_is_set_and_ranks_that_are_all_slower_change_nothing() -> None:
    watched = Watched()
    for number in range(30):
        costs = watched.slowed(dict.fromkeys(range(4), 1.5)) if number > 20 else watched.costs
        assert not watched.iteration(report_of(watched.schedule, costs, (0.0, 7.0 if number > 8 else 0.0, 0.0, 0.0)))


def test_a_slow_rank_is_as_slow_while_the_pace_of_all_changes_and_is_not_when_it_recovers() -> None:
    watched = Watched()
    for number in range(160):
        pace = 1.2 if number >= 30 else 1.0
        ranks = dict.fromkeys(range(4), pace) | ({1: 1.3 * pace} if 10 <= number < 100 else {})
        watched.iteration(report_of(watched.schedule, watched.slowed(ranks)))
        if 13 <= number < 100:
            assert watched.slow() == {1: pytest.approx((0.3, 0.0))}
    assert not watched.slow()


def test_no_rank_is_slow_because_others_have_become_faster() -> None:
    watched = Watched()
    for number in range(60):
        watched.iteration(report_of(watched.schedule, watched.slowed({0: 1.5, 2: 1.5, 3: 1.5} if number < 20 else {})))
        assert not watched.slow()


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "1f1b", "zb-auto"])
@pytest.mark.parametrize("slow", [[2], [2, 3]])
def test_ranks_that_are_slow_from_the_first_iteration_on_are_named_beside_others_with_equal_work(
    name: str, slow: list[int]
) -> None:
    """Up to half of these; ends, which do more, are compared with themselves."""
    watched = Watched(name, 6, works=[0, 1, 1, 1, 1, 5])
    ends = watched.slowed({0: 1.6, 5: 2.0})
    costs = ends.slowed(watched.schedule.placement, dict.fromkeys(slow, 1.4), {})
    changes = [watched.iteration(report_of(watched.schedule, costs, [7.0] * 6)) for _ in range(30)]
    assert [(number, change) for number, change in enumerate(changes) if change] == [(FEWEST + LASTING - 1, slow)]
    assert watched.slow() == dict.fromkeys(slow, pytest.approx((0.4, 0.0)))
    changes = [watched.iteration(report_of(watched.schedule, ends, [7.0] * 6)) for _ in range(30)]
    assert [(number, change) for number, change in enumerate(changes) if change] == [(LASTING - 1, slow)] and not watched.slow()
    watched.costs = evened(costs, watched.schedule.placement, [0, 1, 1, 1, 1, 5])
    assert watched.costs == replace(ends, stages=watched.costs.stages)
    assert [stage.forward for stage in watched.costs.stages] == pytest.approx([stage.forward for stage in ends.stages])


@examples(50)
@given(seed=st.integers(), step=st.floats(0, 0.3), works=st.permutations([0, 1, 1, 1, 2, 2]))
def test_no_rank_is_slow_because_it_has_more_to_do_nor_where_all_change_their_pace(
    seed: int, step: float, works: list[int]
) -> None:
    """A random walk of all, up to 4 % of each beside it, and stages with up to three times as many layers."""
    chance, pace = Random(seed), 1.0
    watched = Watched("1f1b", 6, 6, works=works)
    layers = [1 + chance.random() * 2 for _ in range(3)]
    for _ in range(40):
        pace = min(3.0, max(0.3, pace + chance.uniform(-step, step)))
        ranks = {rank: pace * layers[work] * chance.uniform(1, 1.04) for rank, work in enumerate(works)}
        assert not watched.iteration(report_of(watched.schedule, watched.slowed(ranks), [0.0] * 6))


@pytest.mark.parametrize("knows_loads", [True, False])
def test_a_long_batch_is_no_slow_rank(knows_loads: bool) -> None:
    """Also where its plan was late, and nothing says how long its microbatches are."""
    watched, chance = Watched("zb-v"), Random(0)
    for number in range(40):
        scale = 3.0 if number % 10 > 5 else 1.0
        loads = tuple(Load(*[scale * chance.uniform(0.5, 2)] * 5) for _ in range(8))
        assert not watched.iteration(report_of(watched.schedule, watched.costs.with_loads(loads), knows_loads=knows_loads))
    loads = tuple(Load(*[chance.uniform(0.5, 2)] * 5) for _ in range(8))
    for _ in range(LASTING):
        watched.iteration(report_of(watched.schedule, watched.slowed({2: 1.5}).with_loads(loads), knows_loads=knows_loads))
    assert watched.slow() == {2: pytest.approx((0.5, 0.0), abs=1e-9 if knows_loads else 0.2)}


def changes_of(shares: Iterable[float]) -> list[tuple[int, bool]]:
    """The iterations at which something changes, and whether it is slow from then on."""
    verdict = Verdict()
    return [(number, verdict.share > 0) for number, share in enumerate(shares) if verdict.take(share, Excess(share))]


def most_changes(iterations: int) -> float:
    """The promise of ``Verdict``: patience doubles with every way back, and a way on doubles what is there."""
    return 8 * (math.log2(1 + iterations) + iterations / LONGEST)


@examples(200)
@given(seed=st.integers(), step=st.floats(0.001, 0.2), start=st.floats(0, 1))
def test_a_random_walk_changes_plans_seldom(seed: int, step: float, start: float) -> None:
    chance, walk = Random(seed), [start]
    for _ in range(1000):
        walk.append(min(1.0, max(0.0, walk[-1] + chance.uniform(-step, step))))
    changes = changes_of(walk)
    assert len(changes) <= most_changes(len(walk))
    assert all(later - before >= LASTING for (before, _), (later, _) in pairwise(changes))


@examples(200)
@given(st.lists(st.sampled_from([0.0, 0.03, 0.06, 0.1, 0.3, 1.0]), max_size=300), st.integers(1, 8))
def test_no_sequence_makes_plans_flutter(shares: list[float], times: int) -> None:
    walk = [share for share in shares for _ in range(times)]
    changes = changes_of(walk)
    assert len(changes) <= most_changes(len(walk))
    for at, is_slow in changes:
        last = walk[at - LASTING + 1 : at + 1]
        assert min(last) > ENTER if is_slow else max(last) < LEAVE


@examples(100)
@given(seed=st.integers(), most=st.floats(0, 2))
def test_a_rank_that_changes_speed_in_every_iteration_changes_no_plan(seed: int, most: float) -> None:
    chance = Random(seed)
    assert not changes_of(share * chance.random() for share in [0.0, most] * 300)
    assert not changes_of(chance.uniform(0, ENTER) for _ in range(600))


def test_what_is_slow_and_becomes_much_slower_is_planned_for_anew() -> None:
    verdict = Verdict()
    found = [
        verdict.share for share in [0.1] * 5 + [0.15] * 5 + [0.4] * 5 + [0.04] * 9 + [0.1] * 7 if verdict.take(share, Excess())
    ]
    assert found == [0.1, 0.4, 0.1]
