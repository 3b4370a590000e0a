"""What may be asked for, and what is planned for it: sizes, limits, transformations in their order, the plans of a training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from replanned import planned_again

from megatron.pipeline import cli
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning.choose import best, least_limit
from megatron.pipeline.planner.planning.document import Changes, choice_fields, read, report
from megatron.pipeline.planner.planning.limits import Beside, peak_of_1f1b
from megatron.pipeline.planner.planning.plan_cache import PlanCache
from megatron.pipeline.planner.planning.planned import Variant
from megatron.pipeline.planner.planning.request import MOST_RANKS, Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.kinds import MOST_WAITING
from megatron.pipeline.planner.schedule.core.passes import Kind, Offload, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement, linear
from megatron.pipeline.planner.schedule.core.problem import ChunksDoNotFit, HostLimitTooLow, LimitTooLow, Objective
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.families import AUTO
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks

MIB = 2**20


@pytest.mark.parametrize(
    ("request_", "kind", "message"),
    [
        (Request("zb-w", 4, 8), ValueError, "unknown schedule 'zb-w'; known are 1f1b, "),
        (Request("1f1b", 0, 8), ValueError, "a pipeline needs at least 1 rank, got 0"),
        (Request("zb-v", "4", 8), ValueError, "ranks='4': expected a whole number of at least 1"),  # type: ignore[arg-type]
        (Request("1f1b", 4, 8.0), ValueError, r"microbatches=8\.0: expected a whole number"),  # type: ignore[arg-type]
        (Request("1f1b", 4, 0), ValueError, "a schedule needs at least 1 microbatch, got 0"),
        (Request("zb-v", 4, 8, chunks=3), ChunksDoNotFit, "zb-v has 2 chunks per rank, got 3"),
        (Request("1f1b", 4, 8, group=2), ValueError, "--group 2 sets groups of microbatches, and 1f1b has its own or none"),
        (Request("1f1b", 4, 8, memory_limit=[4, 4]), ValueError, "or one for each of 4 ranks"),
        (Request("1f1b", 4, 8, recompute={4}), ValueError, "cannot recompute stage 4: the stages are 0..3"),
        (Request("1f1b", 4, 8, host_limit=1), ValueError, "a limit of host memory needs offloading, and there is none"),
        (Request("v-half", 4, 8, memory_limit=2), LimitTooLow, "room for 3 microbatches, 3 on every rank, and the limit is 2"),
        (Request("1f1b", MOST_RANKS + 1, 1, bounded=True), ValueError, "4097 ranks are over 4096; take fewer"),
        (Request("1f1b", 1000, 10000, bounded=True), ValueError, "10000 microbatches are over 3000000 passes; take fewer"),
    ],
)
def test_what_cannot_be_asked_for(request_: Request, kind: type[ValueError], message: str) -> None:
    with pytest.raises(kind, match=message):
        request_.problem()


def test_a_field_by_the_flag_s_name_is_answered_with_its_own() -> None:
    with pytest.raises(TypeError, match=r"Request\(pp=4\): the field of --pp is ranks"):
        Request("zb-v", pp=4, microbatches=8)  # type: ignore[call-arg]


def test_python_plans_for_what_the_command_plans_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The makespan: of these costs the shortest span has another order."""
    flags = ["--schedule=zb-v", "--pp=8", "--microbatches=32", "--cost=F=1,B=1.2,W=0.8,comm=0.05", "--json"]
    assert cli.main(["plan", *flags]) == 0
    ours = planning.plan("zb-v", 8, 32, uniform(families.placement("zb-v", 8), 1, 1.2, 0.8, 0.05))
    assert json.loads(capsys.readouterr().out)["passes"] == [list(map(str, row)) for row in ours.passes]


def test_a_request_of_another_family_keeps_the_rest() -> None:
    asked = Request(AUTO, 4, 8, memory_limit=3, objective="makespan")
    variant = Variant("gis", 3, 3)
    again = asked.of(variant)
    assert again.variant == variant and str(again.variant) == "gis v=3 g=3"
    assert replace(again, schedule=AUTO, chunks=None, group=None) == asked
    problem = again.problem()
    assert (problem.objective, problem.limits, problem.group) == (Objective.MAKESPAN, (3,) * 4, 3)


@pytest.mark.parametrize("name", ["v-half", "zb-v", "v-auto", "1f1b"])
def test_limits_are_what_the_name_stands_for_or_what_is_given(name: str) -> None:
    own = {"v-half": 3, "zb-v": 4, "v-auto": 4, "1f1b": None}[name]
    given = {"v-half": 3, "zb-v": 5, "v-auto": 5, "1f1b": 5}[name]  # V-Half stays what its name stands for
    assert Request(name, 4, 8).problem().limits == (None if own is None else (own,) * 4)
    assert Request(name, 4, 8, memory_limit=5).problem().limits == (given,) * 4
    assert Request(name, 4, 8, memory_limit=5, offload=Offload.FULL).problem().limits == (5,) * 4


def test_transformations_are_applied_in_one_order() -> None:
    """First BW and R, then the vocabulary's passes, and copies at the end, which then pay for all of them."""
    costs = cutting.with_equal_copies(uniform(families.placement("interleaved", 2), vocabulary=None))
    options = {"recompute": {0}, "vocabulary": Vocabulary.ONE_BARRIER, "offload": Offload.FULL}
    planned = Request("interleaved", 2, 6, costs, fused={3}, **options).plan()  # type: ignore[arg-type]
    kinds = {work.kind for row in planned.schedule.passes for work in row}
    assert kinds == {Kind.F, Kind.R, Kind.BW, Kind.S, Kind.T, Kind.IF, Kind.IB, Kind.D2H, Kind.H2D}
    without = planning.plan("interleaved", 2, 6, costs, recompute={0}, vocabulary=Vocabulary.ONE_BARRIER)
    stripped = tuple(tuple(work for work in row if not work.kind.is_copy) for row in planned.schedule.passes)
    assert stripped == without.passes, "copies change no order"
    verify(planned.schedule)


@pytest.mark.parametrize("vocabulary", [None, Vocabulary.TWO_BARRIERS])
@pytest.mark.parametrize("name", ["1f1b", "gis", "zb-auto", "v-half"])
def test_the_least_limit_suffices_and_less_does_not(name: str, vocabulary: Vocabulary | None) -> None:
    asked = Request(name, 4, 8, vocabulary=vocabulary)
    least = least_limit(asked)
    assert replace(asked, memory_limit=least).plan().peak <= least
    with pytest.raises(LimitTooLow) as refused:
        replace(asked, memory_limit=0.9 * least).plan()
    assert refused.value.least == pytest.approx(least)


def test_auto_is_the_best_and_flags_of_one_family_are_refused() -> None:
    planned, choice = best(Request(AUTO, 2, 4, memory_limit=2, chunks=2))
    assert choice is not None and choice.best is planned
    assert {each["label"] for each in choice_fields(choice)["candidates"]} >= {"interleaved v=2", "zb-h1"}
    assert best(Request("zb-h1", 2, 4))[1] is None
    for options in ({"group": 2}, {"splits": 2}):
        with pytest.raises(ValueError, match="is for single families: leave it out with --schedule auto"):
            best(Request(AUTO, 2, 4, **options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 3: leave --chunks out"):
        best(Request("zb-v", 2, 4, chunks=3))


def measured(placement: Placement, size: float = MIB) -> Costs:
    stage = StageCosts(1e-3, 1e-3, 1e-3, size)
    return Costs((stage,) * (placement.last_stage + 1), copies=CopyCosts(1e-12, 1e-12))


def test_a_training_plans_each_number_of_microbatches_once() -> None:
    plans = PlanCache(Request("zb-auto", 2, 8, memory_limit=2))
    assert plans.has_family and not plans.is_stock and plans.plan(8) is plans.plan(8)
    assert plans.plan(6).schedule.microbatches == 6 and set(plans.planned) == {8, 6}
    evaluation = plans.plan(8, forward_only=True).schedule
    assert {work.kind for row in evaluation.passes for work in row} == {Kind.F}


def test_planning_again_keeps_what_is_as_short_and_fits() -> None:
    plans = PlanCache(Request("zb-auto", 2, 8))
    before = plans.plan(8).schedule
    costs = measured(plans.placement)
    kept, less = planned_again(plans, costs)[8], planned_again(plans, costs, 1.5 * MIB)[8]
    assert kept.schedule is before
    assert max(less.peaks) <= 1.5 * MIB < max(activation_peaks(before, costs))
    with pytest.raises(ValueError, match="above the limit"):
        plans.adopt({8: kept}, costs, 1.5 * MIB)
    assert plans.plan(8).schedule is before and plans.costs is None, "nothing has changed"
    plans.adopt({8: less}, costs, 1.5 * MIB)
    assert plans.plan(8) is less and plans.costs is costs


def test_host_memory_in_bytes_counts_once_bytes_are_known() -> None:
    plans = PlanCache(Request("gis", 4, 8, offload=Offload.FULL), host_bytes=2 * MIB)
    assert plans.offloads and not plans.plan(8).schedule.has_copies, "costs are in microbatches"
    assert planned_again(plans, measured(plans.placement))[8].schedule.has_copies
    with pytest.raises(HostLimitTooLow):
        planned_again(plans, measured(plans.placement, 2 * MIB))


def test_a_file_is_a_source_like_a_family(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(planning.plan("zb-h1", 2, 4).to_json())
    plans = PlanCache(Request(f"file:{path}", 2, 4, vocabulary=Vocabulary.ONE_BARRIER, offload=Offload.FULL))
    schedule = plans.plan(4).schedule
    assert not plans.has_family and schedule.vocabulary is Vocabulary.ONE_BARRIER
    assert plans.plan(6, forward_only=True).schedule.microbatches == 6, "evaluation needs the placement alone"
    with pytest.raises(ValueError, match="is a schedule of 4 microbatches, but an iteration has 6"):
        plans.plan(6)
    with pytest.raises(ValueError, match="is a schedule for 2 pipeline ranks, not for 4"):
        PlanCache(Request(f"file:{path}", 4, 4))


def test_files_that_do_not_go_with_what_is_asked_for(tmp_path: Path) -> None:
    costs = replace(uniform(families.placement("gis", 2)), copies=CopyCosts(0.01, 0.01))
    offloaded = planning.plan("gis", 2, 6, costs, offload=Offload.FULL)
    spread = planning.plan("1f1b", 2, 6, vocabulary=Vocabulary.TWO_BARRIERS)
    assert offloaded.has_copies

    def plans(schedule: Schedule, **options: object) -> PlanCache:
        path = tmp_path / "plan.json"
        path.write_text(schedule.to_json())
        return PlanCache(Request(f"file:{path}", 2, 6, **options))  # type: ignore[arg-type]

    assert plans(offloaded).offloads and plans(spread).vocabulary is Vocabulary.TWO_BARRIERS
    with pytest.raises(ValueError, match="--offload full adds copies, and those of file:"):
        plans(offloaded, offload=Offload.FULL)
    with pytest.raises(ValueError, match="--vocab-parallel 2 has passes that come before copies to host memory"):
        plans(offloaded, vocabulary=Vocabulary.ONE_BARRIER)
    with pytest.raises(ValueError, match=r"--vocab-parallel 2 is asked for, and file:.* spreads the vocabulary as 1: give one"):
        plans(spread, vocabulary=Vocabulary.ONE_BARRIER)


def test_stock_is_not_planned_and_checked_against_upstream_s_rule() -> None:
    plans = PlanCache(Request("stock", 4, 8, chunks=2))
    plans.check(8)
    assert plans.is_stock and plans.splits == 1 and not plans.planned
    for microbatches, group in ((6, 6), (9, 5)):
        PlanCache(Request("stock", 4, 8, chunks=2, group=group)).check(microbatches)
    for microbatches, group in ((6, 5), (6, 7), (6, 3)):
        with pytest.raises(ValueError, match=f"groups of {group}, at least 4 in the last one, for 4 pipeline ranks, and an "):
            PlanCache(Request("stock", 4, 8, chunks=2, group=group)).check(microbatches)
    with pytest.raises(
        ValueError,
        match=r"a multiple of 4 microbatches for 4 pipeline ranks.* give --microbatch-group-size-per-virtual-pipeline-stage 6",
    ):
        plans.check(6)


def test_the_unit_of_limits_is_the_peak_of_1f1b() -> None:
    equal = Costs((StageCosts(1, 1, 1),) * 4)
    assert peak_of_1f1b(equal, 4, 8) == 4 and peak_of_1f1b(equal, 4, 3) == 3
    stages = (StageCosts(1, 1, 1, 2.0), *(StageCosts(1, 1, 1, 1.0),) * 7)  # two for each of 4 ranks
    assert peak_of_1f1b(Costs(stages), 4, 8) == 12, "rank 0 holds four microbatches of 2 + 1"


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "zb-auto", "v-auto"])
def test_a_last_stage_with_logits_holds_no_more_than_the_fullest_of_1f1b(name: str) -> None:
    """Stages are not equal: the last one of a model with a large vocabulary holds half as much again of each microbatch."""
    placement = families.placement(name, 4)
    *stages, last = uniform(placement).stages
    costs = Costs((*stages, replace(last, activation=last.activation + 0.5, retained=last.retained + 0.5)))
    peak = peak_of_1f1b(costs, 4, 12)
    assert peak == 4
    planned = Request(name, 4, 12, costs).plan()
    assert max(planned.peaks) <= peak * (1 + 1e-9)
    equal = Request(name, 4, 12).plan()
    assert max(equal.peaks) == 4, "where stages are equal all of it is used"


@pytest.mark.parametrize(("name", "share"), [("zb-h2", 7 / 4), ("v-half", 3 / 4), ("v-min", 2 / 4), ("1f1b-v", 3 / 4)])
def test_a_name_that_stands_for_an_amount_is_a_share_of_that(name: str, share: float) -> None:
    placement = families.placement(name, 4)
    *stages, last = uniform(placement).stages
    costs = Costs((*stages, replace(last, activation=last.activation + 0.5, retained=last.retained + 0.5)))
    assert max(Request(name, 4, 12, costs).plan().peaks) <= share * peak_of_1f1b(costs, 4, 12) * (1 + 1e-9)


@pytest.mark.parametrize(("name", "peak", "span"), [("v-half", 15, 60), ("v-min", 14, 70)])
def test_logits_leave_an_amount_room_for_a_pipeline(name: str, peak: float, span: float) -> None:
    """Those of one microbatch take as much as 10 stages. With room for these and nothing else the span is 151.5."""
    *stages, last = uniform(families.placement(name, 8), activation=2, retained=2).stages
    plan = Request(name, 8, 16, Costs((*stages, replace(last, activation=10.0, retained=0.0)))).plan()
    assert max(plan.peaks) == peak and plan.value < span


@pytest.mark.parametrize("name", ["v-min", "zb-v", "v-auto"])
def test_a_limit_of_a_name_that_no_order_keeps_is_the_least_that_one_does(name: str) -> None:
    """One microbatch has to fit, also where all of 1F1B's ranks hold less than a V's rank with both ends of the model."""
    *stages, last = uniform(families.placement(name, 4)).stages
    costs = Costs((replace(stages[0], activation=4.0), *stages[1:], replace(last, activation=4.0)))
    assert peak_of_1f1b(costs, 4, 1) == 4.5
    assert Request(name, 4, 1, costs).plan().peaks[0] == 8


def test_each_weight_gradient_runs_sooner_where_its_rank_is_full() -> None:
    costs = Costs((*(StageCosts(1, 1, 1),) * 3, StageCosts(1, 1, 1, 1.5, 1.5)))

    def backwards_before_weights(given: Costs | None) -> list[int]:
        rows = Request("zb-h1", 4, 12, given).plan().schedule.passes
        return [sum(work.kind is Kind.B for work in row[: row.index(Pass(Kind.W, 0))]) for row in rows]

    assert backwards_before_weights(None) == [1, 2, 3, 4]
    assert backwards_before_weights(costs) == [1, 2, 3, 2], "rank 3 has room for two and a half microbatches of its own"
    with pytest.raises(LimitTooLow) as refused:
        Request("zb-h1", 4, 12, costs, memory_limit=3).plan()
    assert refused.value.least == 4, "rank 0 holds four microbatches whatever W does"
    assert least_limit(Request("zb-h1", 4, 12, costs, memory_limit=3)) == 4


def test_a_limit_of_each_rank_stays_that_of_the_rank(tmp_path: Path) -> None:
    """In the plans of a training for every number of microbatches, after planning again, and in a file."""
    limits = (2.0, 3.0, 4.0, 4.0)
    plans = PlanCache(Request("v-auto", 4, 4, memory_limit=limits))
    for microbatches in (4, 6):
        assert plans.plan(microbatches).problem.limits == limits
    costs = uniform(families.placement("v-auto", 4), backward=2.0)
    plans.adopt(planned_again(plans, costs, limits), costs, limits)
    for microbatches in (4, 5):
        planned = plans.plan(microbatches)
        assert planned.problem.limits == limits and max(planned.peaks) > 2 >= planned.peaks[0]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(report(planned)))
    again = read(str(path), Changes())
    assert again.problem.limits == limits and again.memory_limit == limits
    path.write_text(json.dumps(report(planned) | {"memory_limit": [2.0, 3.0]}))
    with pytest.raises(ValueError, match="memory_limit has 2 numbers for 4 ranks: give one, or one for each rank"):
        read(str(path), Changes())


def test_states_that_are_larger_than_under_1f1b_leave_less_for_activations() -> None:
    """A V's first rank has both ends of the vocabulary: what that takes more than under 1F1B its activations take less."""

    def beside(placement: Placement, vocabulary: Vocabulary | None, in_bytes: bool = False) -> Beside:
        return Beside((2.0, 1.0, 1.0, 2.0), (3.0, 1.0, 1.0, 1.0))

    assert Request("v-auto", 4, 8, beside=beside).problem().limits == (3, 4, 4, 4)
    assert Request("v-half", 4, 8, beside=beside).problem().limits == (3, 3, 3, 3)
    assert Request("v-auto", 4, 8, memory_limit=4, beside=beside).problem().limits == (4, 4, 4, 4), "a user's limit is kept"
    heavy = replace(beside(families.placement("v-auto", 4), None), own=(9.0, 1.0, 1.0, 1.0))
    limits = Request("v-auto", 4, 8, beside=lambda *_, **__: heavy).problem().limits
    assert limits == (2, 4, 4, 4), "no less than half: the schedule would be slow"


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_measured_bytes_set_the_limit_anew(name: str) -> None:
    """Before a profile stages are taken to be equal; a schedule that then holds too much does not stay, though it is shorter."""
    plans = PlanCache(Request(name, 4, 12))
    before = plans.plan(12).schedule
    *stages, last = uniform(plans.placement).stages
    costs = Costs((*stages, replace(last, activation=last.activation + 2, retained=last.retained + 2)))
    limit = peak_of_1f1b(costs, 4, 12)
    assert max(activation_peaks(before, costs)) > limit
    plans.adopt(planned_again(plans, costs), costs)
    for microbatches in (12, 16):
        assert max(plans.plan(microbatches).peaks) <= limit * (1 + 1e-9)


@pytest.mark.parametrize(("vocabulary", "kept"), [(Vocabulary.ONE_BARRIER, 1), (Vocabulary.TWO_BARRIERS, 2)])
def test_shards_of_a_vocabulary_count_for_the_least_limit(vocabulary: Vocabulary, kept: int) -> None:
    """Those of one S and of ``MOST_WAITING`` that wait, beside the microbatches that passes are postponed by."""
    costs = uniform(linear(4))
    costs = replace(costs, vocabulary=replace(costs.vocabulary, activation=0.5))
    with pytest.raises(LimitTooLow) as refused:
        Request("zb-h1", 4, 12, costs, vocabulary=vocabulary, memory_limit=1).plan()
    assert refused.value.least == 4 + kept + 0.5 * (MOST_WAITING + 1)
