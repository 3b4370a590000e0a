"""Weight gradients of a stage behind the collectives of its B: where plans take them, and what costs say of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.rules.verify import verify


def plan(name: str, ranks: int, microbatches: int, behind: float, saved: float, hides: bool = True, **options: object) -> Planned:
    """Stages on which a BW saves 0.1 more; ``hides``: whether costs say what B can compute behind its collectives."""

    def costs(placement: Placement) -> Costs:
        stage = StageCosts(
            3.1, 3.4, 2.9, 1.0, 0.8, fused=6.2 - saved, behind=behind if hides else None, saved=saved if hides else None
        )
        return Costs((stage.share(placement.chunks),) * placement.depth, 0.02)

    return Request(name, ranks, microbatches, costs, **options).plan()  # type: ignore[arg-type]


@examples(12)
@given(
    st.sampled_from(["1f1b", "zb-h1", "zb-h2", "zb-auto", "zb-v", "v-half", "gis-h"]),
    st.integers(2, 4),
    st.integers(1, 4),
    st.floats(0.1, 2.9),
    st.floats(0.0, 1.0),
)
def test_no_plan_is_longer_than_without(name: str, ranks: int, rounds: int, behind: float, saved: float) -> None:
    found, without = (plan(name, ranks, max(2 * ranks, rounds * ranks), behind, saved, hides) for hides in (True, False))
    assert found.value <= without.value * (1 + 1e-9) and found.bound <= found.value * (1 + 1e-9)
    verify(found.schedule)
    assert Schedule.from_json(found.schedule.to_json()) == found.schedule


def test_what_many_microbatches_save_is_worth_a_later_gradient() -> None:
    found, without = (plan("zb-h1", 8, 64, 1.0, 0.6, hides) for hides in (True, False))
    assert found.schedule.shielded >= {*range(1, 8)} and found.value < 0.97 * without.value
    steady = [end - start for work, start, end in found.timeline.ranks[3] if str(work) in ("B30.0", "W30.0")]
    assert steady == pytest.approx([3.4 + 1.0 - 0.6, 2.9 - 1.0])
    assert not plan("zb-h1", 8, 8, 1.0, 0.1).schedule.shielded, "there W in the bubble is worth more"


def test_a_stage_is_shielded_alone_where_that_is_shorter() -> None:
    """On the last stage a longer B delays all others."""
    stage = StageCosts(1.0, 1.0, 1.0, behind=0.5, saved=0.3)
    costs = Costs((stage, stage, stage, replace(stage, behind=1.0, saved=0.011 * 2)))
    found = Request("zb-h1", 4, 6, costs).plan()
    assert 3 not in found.schedule.shielded


def test_work_behind_collectives_of_b_is_no_communication_of_experts() -> None:
    parts = {"dispatch": 0.1, "experts": 1.0, "combine": 0.1, "backward_combine": 0.1, "backward_experts": 1.0}
    stage = StageCosts(3.1, 3.4, 2.9, **parts, backward_dispatch=0.1, weight_experts=1.0, behind=1.5, saved=0.6)
    found = Request("1f1b-v", 4, 16, Costs((stage,) * 8)).plan()
    split = Request("zb-h1", 4, 32, Costs((stage,) * 4)).plan()
    assert split.schedule.shielded and not found.schedule.shielded
    for plan in (found, split):
        exposed, whole = plan.communication
        assert exposed == pytest.approx(whole), "nothing runs in braids"


def test_errors() -> None:
    with pytest.raises(ValueError, match="stage 0: behind takes 2, more than the 1 of weight"):
        Costs((StageCosts(1.0, 1.0, 1.0, behind=2.0, saved=0.1),))
    with pytest.raises(ValueError, match="stage 0: saved takes 2, more than the 1 of backward"):
        Costs((StageCosts(1.0, 1.0, 1.0, behind=1.0, saved=2.0),))
    with pytest.raises(ScheduleError, match=r"shielded has stage 4; the placement has stages 0\.\.3"):
        verify(replace(plan("zb-h1", 4, 8, 1.0, 0.6).schedule, shielded=frozenset({4})))
    with pytest.raises(ValueError, match="shielded must be a list of stages, got 3"):
        Schedule.from_json(plan("1f1b", 2, 4, 1.0, 0.6).schedule.to_json().replace('"passes"', '"shielded": 3, "passes"'))
