"""The memory that a rate needs in the long run, against known schedules and the bound."""

from dataclasses import replace

import pytest

from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.placement import linear, v
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.optimum.sustain import period, smallest_sustaining_limit, sustaining_limits


def problem(ranks: int, backward: float = 1, weight: float = 1, limit: float | None = None) -> Problem:
    """A V whose chunks hold half a microbatch each."""
    limits = None if limit is None else (limit,) * ranks
    return Problem(v(ranks), 6, uniform(v(ranks), 1, backward, weight), limits)


@pytest.mark.parametrize("ranks", range(2, 20))
def test_v_min_holds_what_is_needed_or_little_more(ranks: int) -> None:
    # V-Min sustains the rate with floor((p+4)/3) microbatches.
    least = smallest_sustaining_limit(problem(ranks))
    assert least <= (ranks + 4) // 3 <= least + 1


def test_at_unequal_costs_v_mins_memory_is_not_enough() -> None:
    assert smallest_sustaining_limit(problem(16)) == 6
    assert smallest_sustaining_limit(problem(16, 1.2, 0.8)) == 6.5
    assert smallest_sustaining_limit(problem(3, 1.2, 0.8)) == 2


def test_hops_need_memory() -> None:
    # One microbatch a time 3; the first stage holds it for 4F + 6 hops + 4B + W.
    for hop in (0, 1, 2):
        costs = uniform(linear(4), hop=hop)
        assert sustaining_limits(Problem(linear(4), 8, costs))[0] == -(-(9 + 6 * hop) // 3)


def test_recomputed_and_fused_stages_hold_less_or_longer() -> None:
    stage = StageCosts(1, 1, 1, activation=1, retained=1, recompute=1, checkpoint=0)
    costs = Costs((stage,) * 4)
    plain, again, fused = (
        sustaining_limits(Problem(linear(4), 8, costs, recompute=recompute, fused=fused))
        for recompute, fused in ((frozenset[int](), frozenset[int]()), (frozenset(range(4)), frozenset[int]()),
                                 (frozenset[int](), frozenset(range(4))))
    )  # fmt: skip
    assert plain == (3, 3, 2, 1)
    assert again == (1, 1, 1, 1)
    assert fused == (4, 3, 2, 1)


def test_the_busiest_rank_sets_the_rate() -> None:
    costs = Costs(tuple(StageCosts(f, 1, 1) for f in (1, 1, 4, 1)))
    assert period(Problem(linear(4), 8, costs)) == 6
    assert period(Problem(v(2), 8, costs)) == 9


def test_below_the_limit_the_bound_falls_behind_with_every_microbatch() -> None:
    tight = problem(3, 1.2, 0.8, limit=1.5)
    behind = [lower_bound(replace(tight, microbatches=m)) - m * period(tight) for m in (30, 60, 90)]
    assert behind[0] + 8 < behind[1] < behind[2] - 8


def test_no_time_at_all_needs_no_memory_but_one_microbatchs() -> None:
    assert smallest_sustaining_limit(Problem(v(2), 3, uniform(v(2), 0, 0, 0))) == 1
