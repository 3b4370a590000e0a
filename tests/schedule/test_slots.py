"""Slots of microbatches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import costs_of, schedules

from megatron.pipeline.cli import main
from megatron.pipeline.planner.planning import Request
from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Compute
from megatron.pipeline.planner.schedule.lower.slots import slots_of
from megatron.pipeline.planner.schedule.rules.verify import ScheduleError
from megatron.pipeline.planner.schedule.rules.verify_slots import verify_slots


def counts(planned: Planned, posted: bool = False) -> list[int]:
    """Slots of every rank, on all of its chunks."""
    return [sum(len(set(row)) for row in rows) for rows in planned.slots(posted)]


@examples(150)
@given(st.data())
def test_a_slot_never_has_two_tenants(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    costs = data.draw(costs_of(schedule.placement))
    for each in (schedule, schedule.forward_only()):
        programs = lower(each, costs)
        for posted in (False, True):
            slots = [slots_of(*one, posted) for one in zip(programs, each.placement.stages, strict=True)]
            verify_slots(each, programs, slots, posted)
            for rank, rows in enumerate(slots):
                stays: dict[tuple[int, int], list[int]] = {}  # written a second time, by passes alone
                for place, operation in enumerate(programs[rank]):
                    if isinstance(operation, Compute):
                        stays.setdefault(operation.work[1:], []).append(place)
                for (one, chunk), ours in stays.items():
                    for (other, other_chunk), theirs in stays.items():
                        if chunk == other_chunk and one != other and rows[chunk][one] == rows[chunk][other]:
                            assert ours[-1] < theirs[0] or theirs[-1] < ours[0]


@pytest.mark.parametrize(("name", "most", "posted"), [("zb-h1", 8, 9), ("zb-v", 17, 19), ("v-half", 12, 13), ("1f1b", 8, 8)])
def test_there_are_as_many_as_microbatches_at_a_time(name: str, most: int, posted: int) -> None:
    planned = Request(name, ranks=8, microbatches=32).plan()
    assert (max(counts(planned)), max(counts(planned, posted=True))) == (most, posted)
    if planned.schedule.placement.chunks == 1:
        assert counts(planned) == list(planned.peaks)


@pytest.mark.parametrize("name", ["zb-h1", "v-half"])
def test_a_slot_that_is_free_at_b_is_refused(name: str) -> None:
    planned = Request(name, ranks=4, microbatches=8).plan()
    schedule, slots = planned.schedule, planned.slots()
    until_b = [
        tuple(one for one in row if not (isinstance(one, Compute) and one.work.kind is Kind.W)) for row in planned.programs
    ]
    early = [slots_of(*each) for each in zip(until_b, schedule.placement.stages, strict=True)]
    assert early != list(slots)
    with pytest.raises(
        ScheduleError, match=r"rank \d: .*is in slot \d of chunk \d, which microbatch \d has until its weight grad"
    ):
        verify_slots(schedule, planned.programs, early)


def test_slots_that_are_wrong_are_refused() -> None:
    planned = Request("zb-h1", ranks=4, microbatches=8).plan()
    schedule, programs, slots = planned.schedule, planned.programs, planned.slots()
    for rank, rows in enumerate(slots):
        fewer = [*slots[:rank], tuple(tuple(min(slot, 2) for slot in row) for row in rows), *slots[rank + 1 :]]
        more = [*slots[:rank], tuple(tuple(range(8)) for _ in rows), *slots[rank + 1 :]]
        short = [*slots[:rank], tuple(row[:-1] for row in rows), *slots[rank + 1 :]]
        for wrong, why in ((fewer, "is in slot 2"), (more, "has 8 slots for 4 microbatches"), (short, "slots of \\[7\\]")):
            with pytest.raises(ScheduleError, match=f"rank {rank}: .*{why}"):
                verify_slots(schedule, programs, wrong)
    with pytest.raises(ScheduleError, match=r"rank 1: Receive of the activation .* is in slot"):
        verify_slots(schedule, programs, slots, posted=True)  # whose buffers are there before F


def test_they_are_exported(tmp_path: Path) -> None:
    plan, exported = tmp_path / "plan.json", tmp_path / "exported.json"
    main(["plan", "--schedule", "zb-v", "--pp", "4", "--microbatches", "8", "-o", str(plan)])
    main(["export", str(plan), "-o", str(exported)])
    slots = json.loads(exported.read_text())["slots"]
    assert slots == json.loads(json.dumps(Request("zb-v", ranks=4, microbatches=8).plan().slots(posted=True)))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_has_them(name: str) -> None:
    for ranks, microbatches in ((2, 4), (4, 8), (4, 12)):
        planned = Request(name, ranks=ranks, microbatches=microbatches).plan()
        for posted in (False, True):
            assert min(counts(planned, posted)) > 0
