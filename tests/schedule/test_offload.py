"""Activations in host memory: offloading anything breaks no rule, takes no time, and holds less; and how much less it can be."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from schedule.optima import stored
from schedule_strategies import costs_of, one_rank, parse, schedules, unbraided, with_parts_of

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning.compose import adapted
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, StageCosts, VocabularyCosts, uniform
from megatron.pipeline.planner.schedule.core.cutting import with_shards
from megatron.pipeline.planner.schedule.core.passes import Kind, Offload, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Posting
from megatron.pipeline.planner.schedule.rules.verify import verify, verify_programs
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.braid import braid
from megatron.pipeline.planner.schedule.transforms.offload import host_peaks, moved, offload
from megatron.pipeline.planner.schedule.transforms.transform import recompute, without_copies
from megatron.pipeline.planner.schedule.transforms.vocabulary import shard_vocabulary

FULL, SELECTIVE = Offload.FULL, Offload.SELECTIVE


# --- anything -----------------------------------------------------------------------------------------------------------


def as_floats(costs: Costs) -> Costs:
    """Costs that JSON can hold."""
    stages = [
        StageCosts(*(None if (value := getattr(stage, field.name)) is None else float(value) for field in fields(stage)))  # type: ignore[arg-type]
        for stage in costs.stages
    ]
    links = tuple(link._replace(seconds=float(link.seconds), latency=float(link.latency)) for link in costs.links)
    return replace(costs, stages=tuple(stages), hop=float(costs.hop), links=links)


def is_braided(schedule: Schedule) -> bool:
    return any(row.is_braided for row in schedule.rows)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    """Any schedule, some stages of which run their forwards again, with braids or not, the vocabulary spread or not, and any
    costs."""
    schedule = draw(schedules())
    costs = as_floats(draw(costs_of(schedule.placement)))
    if draw(st.booleans()):
        paying = with_parts_of(schedule.placement.last_stage + 1)
        schedule = braid(schedule, Problem(schedule.placement, schedule.microbatches, paying))
    stages = [
        replace(
            stage,
            recompute=draw(st.sampled_from([0.0, 1.0])),
            checkpoint=stage.activation * draw(st.sampled_from([0.0, 0.25])),
            movable=draw(st.sampled_from([None, None, 0.0, 0.5])),
        )
        for stage in costs.stages
    ]
    stages = [one if one.movable is None else replace(one, movable=one.movable * one.activation) for one in stages]
    seconds = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0])
    switch = draw(st.integers(1, 3))
    copies = CopyCosts(
        draw(seconds), draw(seconds), draw(st.sampled_from([1, 1, 0.75])), switch, draw(st.sampled_from([1, 1 / switch]))
    )
    costs = replace(costs, stages=tuple(stages), copies=copies)
    schedule = recompute(schedule, draw(st.sets(st.integers(0, schedule.placement.last_stage), max_size=3)))
    if schedule.ranks > 1 and not is_braided(schedule) and (vocabulary := draw(st.none() | st.sampled_from(list(Vocabulary)))):
        costs = replace(costs, vocabulary=VocabularyCosts(1, 0.5, 0, 0.5, 0.25))
        schedule = shard_vocabulary(schedule, vocabulary, costs)
    return schedule, costs


def in_host_memory(copies: Sequence[Any], sizes: dict[Pass, float]) -> float:
    """The most that a rank has in host memory, by the times of its copies."""
    steps = [(one.start, sizes[one.work]) if one.work.kind is Kind.D2H else (one.end, -sizes[one.work]) for one in copies]
    return max(itertools.accumulate(change for _, change in sorted(steps)), default=0.0)


def sizes_of(schedule: Schedule, costs: Costs, rank: int) -> dict[Pass, float]:
    """What every D2H and H2D that this rank could have moves."""
    return {
        Pass(kind, work.microbatch, work.chunk): costs.stages[schedule.placement.stage(rank, work.chunk)].moved(
            schedule.recomputes(rank, work)
        )
        for work in schedule.passes[rank]
        if work.kind is Kind.F
        for kind in (Kind.D2H, Kind.H2D)
    }


@examples(80)
@given(cases(), st.sampled_from(list(Offload)), st.none() | st.sampled_from([0.3, 0.6]))
def test_offloading_anything(case: tuple[Schedule, Costs], mode: Offload, share: float | None) -> None:
    plain, costs = case
    sizes = [sizes_of(plain, costs, rank) for rank in range(plain.ranks)]
    movable = [sum(own.values()) / 2 for own in sizes]
    host_limit = None if share is None else max([share * max(movable), *itertools.chain(*(own.values() for own in sizes))])
    schedule = offload(plain, costs, mode, host_limit=host_limit)
    verify(schedule)
    for each in (schedule, schedule.forward_only()):
        verify_programs(each, lower(each, costs), Posting.BATCHED)
    verify(schedule.forward_only(), forward_only=True)
    assert without_copies(schedule).passes == plain.passes
    assert offload(plain.forward_only(), costs, mode, host_limit=host_limit) == plain.forward_only()

    before, after = simulate(plain, costs), simulate(schedule, costs)
    assert after.span == pytest.approx(before.span, rel=1e-9, abs=1e-9)
    assert after.makespan == pytest.approx(before.makespan, rel=1e-9, abs=1e-9)
    peaks = activation_peaks(schedule, costs)
    for rank, (peak, whole) in enumerate(zip(peaks, activation_peaks(plain, costs), strict=True)):
        away = any(work.kind.is_copy for work in schedule.passes[rank])
        assert peak < whole if away else peak == whole, "what saves nothing is left out"

    verify(schedule, costs, [peak * (1 + 1e-9) for peak in peaks])
    held, away_in_all = host_peaks(schedule, costs), moved(schedule, costs)
    for rank in range(schedule.ranks):
        copies = after.copies[rank] if after.copies else ()
        assert in_host_memory(copies, sizes[rank]) <= held[rank] * (1 + 1e-9)
        assert held[rank] <= away_in_all[rank] * (1 + 1e-9)
        assert away_in_all[rank] == pytest.approx(sum(sizes[rank][one.work] for one in copies if one.work.kind is Kind.D2H))
        assert away_in_all[rank] <= movable[rank] * (0.5 if mode is SELECTIVE else 1) * (1 + 1e-9)
        assert host_limit is None or held[rank] <= host_limit * (1 + 1e-9)

    assert Schedule.from_json(schedule.to_json()) == schedule
    assert Timeline.from_json(after.to_json()) == after
    assert Costs.from_json(costs.to_json()) == costs


@examples(25)
@given(cases(), st.sampled_from([0, 0.5, 1]))
def test_a_limit_is_kept_where_it_can_be(case: tuple[Schedule, Costs], between: float) -> None:
    """With the limit anywhere between what is held with all that pays on the way and with nothing."""
    plain, costs = case
    whole = activation_peaks(plain, costs)
    least = activation_peaks(offload(plain, costs, FULL), costs)
    limits = [low + between * (high - low) for low, high in zip(least, whole, strict=True)]
    schedule = offload(plain, costs, FULL, limits)
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(activation_peaks(schedule, costs), limits, strict=True))
    assert between < 1 or schedule == plain, "no more is moved than the limit asks for"


@pytest.mark.parametrize("name", ["dualpipe-v", "interleaved"])
def test_a_file_with_braids_holds_about_as_little_as_the_same_order_without(name: str) -> None:
    """A braid holds what its backward needs from the start, and what its forward keeps until the end. dualpipe-v has split
    backwards and fused ones."""
    placement = families.placement(name, 4, 2 if name == "interleaved" else None)
    costs = replace(with_parts_of(placement.last_stage + 1), copies=CopyCosts(0.4, 0.4))
    file = planning.plan(name, 4, 10, costs, overlap=True)
    schedule, alone = (adapted(each, Problem(placement, 10, costs), FULL) for each in (file, unbraided(file)))
    assert is_braided(schedule) and without_copies(schedule) == file
    verify_programs(schedule, lower(schedule, costs), Posting.BATCHED)
    assert simulate(schedule, costs).span == pytest.approx(simulate(file, costs).span, rel=1e-9)
    held, before, without = (activation_peaks(each, costs) for each in (schedule, file, alone))
    assert all(one <= other + 2 * costs.stages[0].activation for one, other in zip(held, without, strict=True))
    assert held[0] <= before[0] / 2 and sum(held) < 0.75 * sum(before)


def test_a_vocabulary_is_spread_over_a_file_whose_copies_are_planned_anew() -> None:
    """Its passes have no place between copies that are there already."""
    placement = families.placement("zb-v", 4)
    costs = with_shards(replace(uniform(placement, 1, 1, 1), copies=CopyCosts(0.4, 0.4)), Vocabulary.ONE_BARRIER, 4)
    file = offload(planning.plan("zb-v", 4, 8, costs), costs, FULL)
    spread = Problem(placement, 8, costs, vocabulary=Vocabulary.ONE_BARRIER)
    with pytest.raises(ValueError, match=r"has no passes of the vocabulary, which --vocab-parallel 2 puts .* give --offload"):
        adapted(file, spread, None)
    schedule = adapted(file, spread, FULL)
    assert schedule.has_copies and schedule.vocabulary and without_copies(schedule) == adapted(without_copies(file), spread, None)


# --- a few that can be seen through -------------------------------------------------------------------------------------


def text(schedule: Schedule) -> str:
    return " ".join(str(work).removesuffix(".0") for work in schedule.passes[0])


LINE = "F0 F1 F2 F3 BW3 BW2 BW1 BW0"


def test_the_longest_lifespan_goes() -> None:
    """To the host as early as can be, back as late as can be."""
    plain, costs = one_rank("F0 F1 F2 BW2 BW1 BW0")
    assert text(offload(plain, costs, FULL)) == "F0 F1 D2H0 F2 BW2 H2D0 BW1 BW0"
    assert moved(offload(plain, costs, FULL), costs) == host_peaks(offload(plain, costs, FULL), costs) == [1]
    # Nothing is moved where it could not be back in time, or where nothing can be moved.
    for slow in (replace(costs, copies=CopyCosts(4, 4)), replace(costs, stages=(replace(costs.stages[0], movable=0.0),))):
        assert offload(plain, slow, FULL) == plain
    # A copy may end as a pass starts, and start as one ends.
    plain, costs = one_rank("F0 F1 F2 F3 BW3 BW2 BW1 BW0", CopyCosts(2, 4))
    assert text(offload(plain, costs, FULL)) == "F0 F1 F2 D2H0 F3 BW3 H2D0 BW2 BW1 BW0"


def test_what_runs_again_moves_its_checkpoint() -> None:
    row = "F0 F1 F2 F3 R0 BW0 R1 BW1 R2 BW2 R3 BW3"
    plain, costs = one_rank(row, CopyCosts(1, 1), recompute=1.0, checkpoint=0.5)
    schedule = offload(plain, costs, FULL)
    verify(schedule)
    assert moved(schedule, costs)[0] and max(moved(schedule, costs)) <= 2
    for work, after in itertools.pairwise([work for work in schedule.passes[0] if work[1:3] == (3, 0)]):
        assert (work.kind, after.kind) != (Kind.R, Kind.H2D), "R needs it"


def test_host_memory_is_what_is_away_at_once() -> None:
    """Two that are away one after the other fit where two at once do not."""
    plain, costs = one_rank(f"{LINE} F4 F5 F6 F7 BW7 BW6 BW5 BW4", CopyCosts(0.25, 0.25))
    free = offload(plain, costs, FULL)
    assert host_peaks(free, costs)[0] > 1
    tight = offload(plain, costs, FULL, host_limit=1)
    assert host_peaks(tight, costs) == [1] and moved(tight, costs)[0] > 1


def test_what_is_too_large_leaves_room_for_the_rest() -> None:
    """The activations of the first chunk live longest, but neither the host nor half of all has room for one."""
    large, small = StageCosts(1, 1, 1, activation=100), StageCosts(1, 1, 1, activation=1)
    costs = Costs((large, small, small), copies=CopyCosts(0, 0))
    plain = Schedule("own", interleaved(1, 3), 1, parse("F0.0 F0.1 F0.2 BW0.2 BW0.1 BW0.0"))
    for mode, host_limit in ((FULL, 2), (SELECTIVE, None)):
        schedule = offload(plain, costs, mode, host_limit=host_limit)
        assert moved(schedule, costs) == [1] and activation_peaks(schedule, costs) == [101]


def test_copies_are_planned_with_everything_else_on_the_way() -> None:
    plain = planning.plan("interleaved", 4, 8)
    costs = replace(uniform(plain.placement), copies=CopyCosts(0.5, 0.5, both=0.5))
    slower = replace(costs, copies=CopyCosts(1, 1))
    assert offload(plain, costs, FULL) == offload(plain, slower, FULL)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: offload(*one_rank("F0 F1 D2H0 F2 D2H1 H2D0 BW0 H2D1 BW1 BW2"), FULL),
            "own has copies to host memory already: offload the schedule without them",
        ),
        (
            lambda: planning.plan("seq-1f1b", 4, 8, offload=FULL),
            "--offload full moves whole microbatches, and the schedule cuts them into 2 slices",
        ),
        (
            lambda: offload(*one_rank(LINE), FULL, host_limit=0.5),
            "host memory limit of 0.5 a rank has no room for one microbatch of a chunk, which takes 1 or more: raise it",
        ),
        (lambda: planning.plan("1f1b", 4, 8, offload=FULL, host_limit=0), "a limit of host memory must be above 0, got 0"),
        (lambda: planning.plan("1f1b", 4, 8, host_limit=1), "a limit of host memory needs offloading, and there is none"),
    ],
)
def test_what_cannot_be_offloaded_says_so(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- against the least there is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", Offload)
@pytest.mark.parametrize("k", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("gis-h", 2)])
def test_plans_hold_the_least_there_is(name: str, chunks: int, k: float, mode: Offload) -> None:
    schedule, costs = planning.plan(name, 4, 6, chunks=chunks), with_k(k, families.placement(name, 4, chunks))
    assert activation_peaks(offload(schedule, costs, mode), costs) == pytest.approx(stored("offload")[f"{name} {mode} {k}"])


# --- how much less it can be --------------------------------------------------------------------------------------------


def with_k(k: float, placement: Placement) -> Costs:
    """F = B = W, and a copy there and back that takes k times as long as they do."""
    return replace(uniform(placement), copies=CopyCosts(1.5 * k, 1.5 * k))


@functools.cache
def planned(name: str, ranks: int, chunks: int, limit: float | None) -> Schedule:
    """With 4 microbatches for every rank."""
    return planning.plan(name, ranks, 4 * ranks, uniform(families.placement(name, ranks, chunks)), chunks, limit)


def reached(
    name: str, ranks: int, chunks: int, ks: Sequence[float], mode: Offload, limit: float | None = None
) -> tuple[float, list[float]]:
    """The largest peak of a rank, in chunks, without offloading and, at the same span, with it at every k."""
    placement = families.placement(name, ranks, chunks)
    plain = planned(name, ranks, chunks, limit)
    left = []
    for k in ks:
        costs = with_k(k, placement)
        schedule = offload(plain, costs, mode)
        assert simulate(schedule, costs).span == pytest.approx(simulate(plain, costs).span, rel=1e-9), (
            "at most 1 % more is wanted"
        )
        left.append(max(activation_peaks(schedule, costs)) * chunks)
    return max(activation_peaks(plain, uniform(placement))) * chunks, left


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 4), (4, 2), (8, 4)])
def test_what_is_left_does_not_grow_with_the_pipeline(ranks: int, chunks: int) -> None:
    """PO-F: of the p*v chunks that the whole model has, no more than a few are left however large p and v are: O(M/(v p)).

    Measured with k = 0.5 and 1, from zb-auto with room for p/2 microbatches.
    """
    measured = {(2, 4): 4, (4, 2): 3, (8, 4): 6}
    before, (half, whole) = reached("zb-auto", ranks, chunks, (0.5, 1.0), FULL, limit=max(1.0, ranks / 2))
    assert before <= max(ranks, 2) * chunks / 2 + 1e-9
    assert half <= whole <= measured[ranks, chunks]


@pytest.mark.parametrize(("ranks", "chunks", "measured"), [(8, 2, (5, 5, 5)), (8, 4, (8, 8, 9))])
def test_half_of_everything_is_enough_for_slow_copies(ranks: int, chunks: int, measured: tuple[float, ...]) -> None:
    """PO-H: where 1 < k <= 2, about (1 + 2/v)/8 of what interleaved 1F1B holds, p(v+1) - 1 chunks.

    From zb-auto with room for p/2 microbatches; its span is 10 % (v = 2) and 3 % (v = 4) above that of interleaved 1F1B.
    """
    _, left = reached("zb-auto", ranks, chunks, (1.25, 1.5, 2.0), SELECTIVE, limit=ranks / 2)
    assert all(peak <= known for peak, known in zip(left, measured, strict=True))
    assert max(left) <= 1.35 * (1 + 2 / chunks) / 8 * (ranks * (chunks + 1) - 1)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 8), (4, 4), (8, 2), (8, 8)])
def test_full_offload_of_interleaved_with_fast_copies(ranks: int, chunks: int) -> None:
    """With k <= 1/2 a copy to the host is over before the next F is: what is left of p(v+1)-1 chunks is 3, or 2 of short ones."""
    before, (after,) = reached("interleaved", ranks, chunks, (0.5,), FULL)
    assert before == ranks * (chunks + 1) - 1 and after <= 3


def test_a_limit_is_of_what_is_left_on_the_device() -> None:
    costs = with_k(0.25, families.placement("zb-auto", 2, 4))

    def within(limit: float, mode: Offload | None = FULL) -> tuple[float, float]:
        schedule = planning.plan("zb-auto", 2, 4, costs, 4, limit, offload=mode)
        return simulate(schedule, costs).span, max(activation_peaks(schedule, costs))

    span, peak = within(1.25)
    assert peak <= 1.25
    assert span < within(1.25, None)[0], "in the same room on the device"
    with pytest.raises(LimitTooLow) as refused:
        within(0.25)
    least = refused.value.least
    assert 0.25 < least < 1, "one microbatch is what is needed without offloading"
    assert within(least)[1] <= least * (1 + 1e-9)


@pytest.mark.parametrize("name", ["v-auto", "v-half", "v-min", "gis", "gis-h", "1f1b", "interleaved"])
def test_every_family_within_a_limit(name: str) -> None:
    """A name stands for the schedule that is offloaded: within what that can do, the limit is kept, and below it is refused."""
    costs = with_k(0.5, families.placement(name, 4))
    plain, moved = (activation_peaks(planning.plan(name, 4, 8, costs, offload=mode), costs) for mode in (None, FULL))
    assert sum(moved) < sum(plain)
    most, least = max(plain), max(moved)
    for limit in (least, (least + most) / 2):
        schedule = planning.plan(name, 4, 8, costs, memory_limit=limit, offload=FULL)
        assert max(activation_peaks(schedule, costs)) <= limit * (1 + 1e-9)
    with pytest.raises(LimitTooLow, match=r"raise the limit to|give at least") as refused:
        planning.plan(name, 4, 8, costs, memory_limit=0.1, offload=FULL)
    planning.plan(name, 4, 8, costs, memory_limit=refused.value.least, offload=FULL)
