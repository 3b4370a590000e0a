"""Every family for one request, and the choice among them."""

from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.planner.planning.choose import candidates, choose
from megatron.pipeline.planner.planning.planned import Planned, Variant
from megatron.pipeline.planner.planning.request import Request, variants
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.problem import Objective
from megatron.pipeline.planner.schedule.families import AUTO
from megatron.pipeline.planner.schedule.optimum.bound import least_limit
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate

FIXED = [name for name, family in families.FAMILIES.items() if family.memory is None]  # those that do not search


def equal(placement: Placement) -> Costs:
    return uniform(placement, hop=0.1)


@examples(30)
@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.none() | st.sampled_from([0.4, 1, 2.5, 4, 9]),
    st.sampled_from(Objective),
    st.permutations(FIXED),
)
def test_whatever_is_planned_obeys_the_rules_and_the_best_is_first(
    ranks: int, microbatches: int, limit: float | None, objective: Objective, names: list[str]
) -> None:
    request = Request(AUTO, ranks, microbatches, equal, memory_limit=limit, objective=objective)
    wanted = variants(ranks, names[:4], chunks=(2, 3))
    planned, refused = candidates(request, wanted)
    assert {each.variant for each in planned} | {each.variant for each in refused} == set(wanted)
    assert len(planned) + len(refused) == len(wanted)
    for each in planned:
        verify(each.schedule, each.problem.costs, limit)
        timeline = simulate(each.schedule, each.problem.costs)
        assert each.value == (timeline.span if objective is Objective.SPAN else timeline.makespan)
        assert each.peak == max(activation_peaks(each.schedule, each.problem.costs))
        assert each.bound <= each.value * (1 + 1e-9)
    assert [each.value for each in planned] == sorted(each.value for each in planned)
    for refusal in refused:
        assert "\n" not in refusal.reason
        if refusal.needs is not None:
            assert limit is not None and refusal.needs > limit
    _check_choice(planned)


def _check_choice(planned: list[Planned]) -> None:
    """The rules of ``choose``, said a second time."""
    if not planned:
        return
    choice = choose(planned)
    best = choice.best
    assert choice.why_not.keys() == {each.variant for each in planned if each is not best}
    shortest = min(each.value for each in planned)
    assert best.value <= 1.001 * shortest
    for each in planned:
        if each.value <= 1.001 * shortest:
            assert best.peak <= each.peak * (1 + 1e-8)
            assert each is best or choice.why_not[each.variant].startswith("as short, ")
        else:
            assert "% longer" in choice.why_not[each.variant]


@pytest.mark.parametrize("name", FIXED)
def test_what_is_needed_is_enough_and_less_is_not(name: str) -> None:
    (refusal,) = candidates(Request(AUTO, 4, 8, equal, memory_limit=0.1), [Variant(name)])[1]
    assert refusal.needs is not None
    enough = Request(AUTO, 4, 8, equal, memory_limit=refusal.needs)
    assert enough.of(Variant(name)).plan().peak == pytest.approx(refusal.needs)
    with pytest.raises(ValueError, match="limit"):
        replace(enough, memory_limit=0.99 * refusal.needs).of(Variant(name)).plan()


def test_a_limit_is_not_all_that_may_be_wrong() -> None:
    def only_four_stages(placement: Placement) -> Costs:
        return Costs((StageCosts(1, 1, 1),) * 4)

    planned, refused = candidates(
        Request(AUTO, 4, 8, only_four_stages, memory_limit=1), variants(4, ["1f1b", "interleaved"], chunks=[2])
    )
    assert not planned
    assert [refusal.needs for refusal in refused] == [4, None]
    assert "costs of 4 stages for a placement of 8" in refused[1].reason


def test_what_is_tried() -> None:
    assert [str(each) for each in variants(8, ["1f1b", "zb-auto", "gis", "gis-h"])] == [
        *("1f1b", "zb-auto v=1", "zb-auto v=2", "zb-auto v=3", "zb-auto v=4"),
        *("gis v=2", "gis v=2 g=6", "gis v=3", "gis v=3 g=6", "gis v=4", "gis v=4 g=6", "gis-h v=2", "gis-h v=3", "gis-h v=4"),
    ]
    assert variants(2, ["interleaved", "gis", "zb-h1"], chunks=[3]) == [
        Variant("interleaved", 3),
        Variant("gis", 3),
        Variant("zb-h1"),
    ]
    assert {each.name for each in variants(4)} == set(families.FAMILIES)
    with pytest.raises(ValueError, match="unknown schedule 'zb'; known are 1f1b"):
        variants(4, ["zb"])
    with pytest.raises(ValueError, match=r"; did you mean v-half\?"):
        variants(4, ["v-hafl"])
    with pytest.raises(ValueError, match=r"dualpipe-v$"):
        variants(4, ["qqqq"])
    for ranks in range(1, 9):
        assert not candidates(Request(AUTO, ranks, 3, equal), variants(ranks, ["gis"]))[1], "every group that is tried exists"


def test_ties_go_to_less_memory_then_fewer_messages_then_the_simpler_family() -> None:
    # Without hops, and W = 0, the splitting of ZB-H1 gains nothing but takes nothing either: 1F1B is simpler.
    free = Request(AUTO, 4, 8, lambda placement: uniform(placement, 1, 2, 0))
    planned, _ = candidates(free, variants(4, ["zb-h2", "zb-h1", "1f1b"]))
    choice = choose(planned)
    assert str(choice.best.variant) == "1f1b"
    assert choice.why_not == {Variant("zb-h1"): "as short, less simple", Variant("zb-h2"): "as short, holds more"}
    # On one rank every schedule is as short, and holds one microbatch; chunks would only send.
    planned, _ = candidates(Request(AUTO, 1, 4, equal), variants(1, ["interleaved", "gis", "1f1b"]))
    choice = choose(planned)
    assert str(choice.best.variant) == "1f1b"
    assert choice.why_not[Variant("interleaved", 2)] == "as short, sends more"


def test_within_the_memory_of_1f1b_zero_bubble_is_the_choice() -> None:
    planned, refused = candidates(Request(AUTO, 3, 9, uniform, memory_limit=3, objective="span"), variants(3, chunks=[2]))
    choice = choose(planned)
    assert choice.best.value == 27
    assert choice.best.peak <= 3
    assert {refusal.variant.name for refusal in refused} == {"interleaved", "dualpipe-v"}


def test_recomputation_and_fusion_go_by_the_placement() -> None:
    def first(placement: Placement) -> list[int]:
        return [0]

    def last(placement: Placement) -> list[int]:
        return [placement.last_stage]

    request = Request(AUTO, 2, 3, equal, recompute=first, fused=last)
    for name in ("zb-h1", "gis", "dualpipe-v"):
        found = request.of(Variant(name)).plan()
        kinds = {stage: set[str]() for stage in range(len(found.problem.costs.stages))}
        for rank, row in enumerate(found.schedule.passes):
            for work in row:
                kinds[found.schedule.placement.stage(rank, work.chunk)].add(work.kind)
        assert "R" in kinds[0] and "R" not in kinds[max(kinds)]
        assert kinds[max(kinds)] == {"F", "BW"} and "W" in kinds[0]
    assert max(least_limit(found.problem, rank) for rank in range(2)) <= found.peak
