"""Schedules with a spread vocabulary: inserted into anything, they obey every rule and hold a microbatch more per barrier."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import costs_of, exact, moved, parse, schedules, without

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, VocabularyCosts, uniform
from megatron.pipeline.planner.schedule.core.kinds import MOST_WAITING
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import (
    Collective,
    Compute,
    Exchange,
    Join,
    Posting,
    Program,
    Send,
    Validate,
    Wait,
)
from megatron.pipeline.planner.schedule.lower.traffic import of_programs
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.rules.deadlock import nothing_deadlocks
from megatron.pipeline.planner.schedule.rules.transports import TRANSPORTS
from megatron.pipeline.planner.schedule.rules.verify import ScheduleError, verify, verify_programs
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.vocabulary import _backwards_behind, delay_backwards, shard_vocabulary

ONE, TWO, INTERLACED = Vocabulary.ONE_BARRIER, Vocabulary.TWO_BARRIERS, Vocabulary.INTERLACED
SHARDS = VocabularyCosts(S=0.5, T=0.5, IF=0.02, IB=0.02)


def planned(name: str, ranks: int, microbatches: int, vocabulary: Vocabulary | None, hop: float = 0.05) -> tuple[Schedule, Costs]:
    costs = replace(uniform(families.placement(name, ranks), hop=hop), vocabulary=SHARDS)
    return planning.plan(name, ranks, microbatches, costs, vocabulary=vocabulary), costs


@examples(150)
@given(st.data())
def test_any_schedule_with_any_costs(data: st.DataObject) -> None:
    stages, vocabulary = data.draw(schedules()), data.draw(st.sampled_from(list(Vocabulary)))
    numbers = st.sampled_from([0, 0, 1, 2, 5]).map(exact)
    S, T, IF, IB, held = (data.draw(numbers) for _ in range(5))
    shards = VocabularyCosts(S, T, IF, IB, held, exchange=data.draw(st.none() | numbers))
    costs = replace(data.draw(costs_of(stages.placement)), vocabulary=shards)
    by = data.draw(st.integers(0, 3))
    roomy = delay_backwards(stages, by)
    verify(roomy)
    schedule = shard_vocabulary(roomy, vocabulary, costs)
    verify(schedule)
    assert Schedule.from_json(schedule.to_json()) == schedule
    for rank, row in enumerate(schedule.passes):
        own = [work for work in row if not work.kind.is_of_vocabulary]
        assert sorted(own) == sorted(stages.passes[rank]), "nothing is lost, and nothing of a stage added"
    largest = max(stage.activation for stage in costs.stages)
    more = by * stages.placement.chunks * largest + stages.microbatches * shards.activation
    for peak, before in zip(activation_peaks(schedule, costs), activation_peaks(stages, costs), strict=True):
        assert peak <= before + more
    evaluation = schedule.forward_only()
    verify(evaluation, forward_only=True)
    for each in (schedule, evaluation, shard_vocabulary(stages.forward_only(), vocabulary, costs)):
        verify_programs(each, lower(each, costs), Posting.BATCHED)


def test_backwards_fall_behind_as_they_are_split() -> None:
    """At the places of the microbatches two later, of which others are fused, weights keep their order."""
    mixed = Schedule("mixed", linear(1), 4, parse("F0 F1 F2 F3 B0 W0 BW1 B2 B3 W2 W3"))
    behind = _backwards_behind(mixed, 2)
    verify(behind)
    assert " ".join(map(str, behind.passes[0])) == "F0.0 F1.0 F2.0 F3.0 B0.0 W0.0 BW1.0 B2.0 B3.0 W2.0 W3.0"


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (4, 1), (4, 3), (4, 12), (7, 20), (8, 24)])
@pytest.mark.parametrize(("vocabulary", "more"), [(ONE, 1), (TWO, 2)])
def test_1f1b_holds_as_many_more_as_there_are_barriers(ranks: int, microbatches: int, vocabulary: Vocabulary, more: int) -> None:
    schedule, costs = planned("1f1b", ranks, microbatches, vocabulary)
    held = [min(microbatches, ranks - rank + more) for rank in range(ranks)]
    assert activation_peaks(schedule, costs) == held


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "1f1b-v", "dualpipe-v"])
@pytest.mark.parametrize(("vocabulary", "more"), [(ONE, 1), (TWO, 2)])
def test_every_family_keeps_its_bubble(name: str, vocabulary: Vocabulary, more: int) -> None:
    """Above the bubble of the family itself there is S before the first backward, T, and what takes them from rank to rank."""
    ranks, microbatches = 4, 16
    schedule, costs = planned(name, ranks, microbatches, vocabulary)
    stages, _ = planned(name, ranks, microbatches, None)
    idle = simulate(schedule, costs).makespan - microbatches * (3 + SHARDS.total)
    idle_without = simulate(stages, costs).makespan - microbatches * 3
    assert idle <= idle_without + 0.25 * SHARDS.total + 4 * more * costs.exchange
    assert max(activation_peaks(schedule, costs)) <= max(activation_peaks(stages, costs)) + more


def test_interlaced_holds_half_a_pipeline_more_and_stands_still() -> None:
    schedule, costs = planned("1f1b", 4, 32, INTERLACED, hop=0.0)
    assert 6 <= max(activation_peaks(schedule, costs)) <= 8
    better, _ = planned("1f1b", 4, 32, ONE, hop=0.0)
    assert simulate(better, costs).makespan <= simulate(schedule, costs).makespan
    for row in schedule.passes:
        for work, after in itertools.pairwise([work for work in row if work.kind in (Kind.S, Kind.T)]):
            assert work.kind is not Kind.S or after == work._replace(kind=Kind.T), "T follows its S"


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "interleaved"])
@pytest.mark.parametrize("vocabulary", list(Vocabulary))
def test_outputs_of_the_input_layer_are_held_for_few_microbatches(name: str, vocabulary: Vocabulary) -> None:
    """On the first stage from IF to F, and elsewhere from IF until the sum of all parts has been made."""
    schedule, costs = planned(name, 4, 16, vocabulary)
    first, chunk = schedule.placement.home(0)
    for rank, program in enumerate(lower(schedule, costs)):
        held, most = 0, 0
        for one in program:
            match one:
                case Compute(Pass(Kind.IF)):
                    held += 1
                case Compute(Pass(Kind.F, _, at)) if rank == first and at == chunk:
                    held -= 1
                case Wait(Collective(Exchange.EMBEDDING)) if rank != first:
                    held -= 1
            most = max(most, held)
        assert most <= MOST_WAITING


def test_with_one_barrier_the_gradients_of_the_output_layer_wait_for_idle_time() -> None:
    schedule, costs = planned("1f1b", 4, 8, ONE)
    last = [work for work in schedule.passes[3] if work.kind in (Kind.S, Kind.T)]
    assert last[:2] == [Pass(Kind.S, 0), Pass(Kind.S, 1)], "the last rank is busy: T waits as long as it may"
    for row in schedule.passes:
        count = itertools.accumulate({Kind.S: 1, Kind.T: -1}.get(work.kind, 0) for work in row)
        assert max(count) <= MOST_WAITING + 1
    assert simulate(schedule, costs).makespan < simulate(planned("1f1b", 4, 8, TWO)[0], costs).makespan


def test_limits_leave_room_for_the_barriers() -> None:
    costs = replace(uniform(families.placement("v-auto", 4)), vocabulary=SHARDS)
    schedule = planning.plan("v-auto", 4, 16, costs, memory_limit=4.0, vocabulary=ONE)
    assert max(activation_peaks(schedule, costs)) <= 4
    told = "needs 5 on a rank, of which 1 is for spreading it, and the limit is 4: raise it to 5"
    with pytest.raises(LimitTooLow, match=told) as refused:
        planning.plan("1f1b", 4, 16, memory_limit=4, vocabulary=ONE)
    assert refused.value.least == 5
    with pytest.raises(LimitTooLow, match="room for 3 microbatches, 4 on every rank, and the limit is 3"):
        planning.plan("v-half", 4, 16, memory_limit=3, vocabulary=ONE)


@pytest.mark.parametrize("vocabulary", Vocabulary)
def test_a_limit_that_has_room_for_all_microbatches_limits_nothing(vocabulary: Vocabulary) -> None:
    assert max(activation_peaks(planning.plan("1f1b", 4, 3, memory_limit=3.0, vocabulary=vocabulary), uniform(linear(4)))) == 3
    with pytest.raises(LimitTooLow) as refused:
        planning.plan("1f1b", 4, 3, memory_limit=2.0, vocabulary=vocabulary)
    assert refused.value.least == 3.0, "not as many more as there are barriers"


def test_a_limit_that_suffices_is_not_refused_for_what_is_reserved() -> None:
    """Where stages run their forwards again, a microbatch more takes less than a microbatch."""
    schedule = planning.plan("dualpipe-v", 4, 4, memory_limit=2, vocabulary=INTERLACED, recompute=range(8))
    assert max(activation_peaks(schedule, uniform(schedule.placement))) <= 2


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("1f1b", 1, "--vocab-parallel 2 spreads .* --pipeline-model-parallel-size is 1"),
        ("seq-1f1b", 4, "--vocab-parallel 2 needs .* cuts them into 2 slices"),
    ],
)
def test_what_cannot_spread_it_says_so(name: str, ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planning.plan(name, ranks, 8, vocabulary=ONE)


def test_the_bound_counts_the_shards() -> None:
    costs = replace(uniform(families.placement("1f1b", 4)), vocabulary=SHARDS)
    problem = planning.Request("1f1b", 4, 100, costs, vocabulary=ONE).problem()
    assert lower_bound(problem) == pytest.approx(100 * (3 + SHARDS.total))
    assert lower_bound(problem) <= simulate(planning.solve("1f1b", problem), costs).span


SPREAD, COSTS = planned("1f1b", 2, 2, ONE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: [work for work in row if work != Pass(Kind.T, 1)], "rank 1: T1.0 is missing"),
        (lambda row: [work for work in row if work != Pass(Kind.IF, 0)], "rank 1: IF0.0 is missing"),
        (lambda row: [*row, Pass(Kind.S, 0)], "rank 1: S0.0 runs twice"),
        (lambda row: [*row, Pass(Kind.S, 2)], "rank 1: S2.0 is of an unknown microbatch"),
        (
            lambda row: [work._replace(chunk=1) if work.kind is Kind.S else work for work in row],
            "S0.1 is of chunk 1; passes of the",
        ),
        (lambda row: sorted(row, key=lambda work: work.kind is Kind.S), "rank 1: T0.0 runs before S0.0"),
        (lambda row: [Pass(Kind.IF, 1), *(work for work in row if work != Pass(Kind.IF, 1))], "IF0.0 runs after IF1.0; IF"),
        (lambda row: sorted(row, key=lambda work: work.kind is not Kind.IB), "rank 1 is stuck at IB0.0"),
    ],
)
def test_a_broken_rule_is_named(change: Callable[[list[Pass]], list[Pass]], message: str) -> None:
    rows = (SPREAD.passes[0], tuple(change(list(SPREAD.passes[1]))))
    with pytest.raises(ScheduleError, match=message):
        verify(replace(SPREAD, passes=rows))


def test_passes_of_a_vocabulary_need_a_spread_one() -> None:
    with pytest.raises(ScheduleError, match=r"IF0.0 in a schedule whose vocabulary is not spread"):
        verify(replace(SPREAD, vocabulary=None))


STATISTICS = Collective(Exchange.STATISTICS, 0)
OUTPUT = Collective(Exchange.OUTPUT, 0)
GRADIENT = Collective(Exchange.GRADIENT, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: without(p, Join(STATISTICS)), "rank 1: Join of the statistics of microbatch 0 .* is missing"),
        (lambda p: without(p, Wait(STATISTICS)), "rank 1: Wait of the statistics of microbatch 0 .* is missing"),
        (lambda p: (*p, Join(OUTPUT)), "Join of the output of microbatch 0 among all ranks comes twice"),
        (lambda p: (*p, Join(Collective(Exchange.OUTPUT, 9))), "output of microbatch 9 among all ranks, which nothing needs"),
        (lambda p: moved(p, Join(STATISTICS), Compute(Pass(Kind.S, 0))), "must come in this order: S0.0, Join, Wait, T0.0"),
        (
            lambda p: moved(p, Wait(STATISTICS), Compute(Pass(Kind.T, 0)), after=True),
            "must come in this order: S0.0, Join, Wait, T0.0",
        ),
        (
            lambda p: moved(p, Join(GRADIENT), Compute(Pass(Kind.T, 0)), after=True),
            "comes after T, which ends what it is made of",
        ),
        (lambda p: moved(p, Join(Collective(Exchange.EMBEDDING, 1)), Join(STATISTICS), after=True), "in one order"),
        (lambda p: moved(p, Validate(), Join(OUTPUT)), "crosses the validation|may"),
    ],
)
def test_a_broken_rule_of_programs_is_named(change: Callable[[Program], Program], message: str) -> None:
    first, second = lower(SPREAD, COSTS)
    with pytest.raises(ScheduleError, match=message):
        verify_programs(SPREAD, (first, change(second)))


def test_collectives_that_wait_for_messages_in_a_circle_are_a_deadlock() -> None:
    """Both ranks join in one order, but the first waits in it before it sends what the second needs to get there."""
    first, second = lower(SPREAD, COSTS)
    late = [one for one in first if isinstance(one, Send)][-1]
    changed = of_programs(SPREAD, (moved(first, late, Join(STATISTICS), after=True), second))
    with pytest.raises(ScheduleError, match=r"deadlock over rendezvous .*rank 0 in Join of the"):
        nothing_deadlocks(changed, TRANSPORTS["rendezvous"])


def test_json_says_how_it_is_spread() -> None:
    fields = SPREAD.fields()
    assert fields["vocab_parallel"] == "2"
    text = SPREAD.to_json()
    with pytest.raises(ValueError, match="vocab_parallel must be one of 1, 2, interlaced, got '3'"):
        Schedule.from_json(text.replace('"vocab_parallel": "2"', '"vocab_parallel": "3"'))
    assert Schedule.from_json(text.replace('"vocab_parallel": "2"', '"vocab_parallel": 2')) == SPREAD
