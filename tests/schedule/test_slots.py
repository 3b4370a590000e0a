"""Slots of microbatches, and the order of graphs that are captured by slot."""

from __future__ import annotations

import json
from collections import Counter
from math import ceil
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
from megatron.pipeline.planner.schedule.lower.slots import GraphOrder, graph_order, slots_of
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


def check(planned: Planned, layers: tuple[int, ...]) -> list[GraphOrder]:
    """The orders of all ranks, of which each is one that Transformer Engine can capture, with the plan's own W."""
    found = [planned.graph_order(rank, layers) for rank in range(planned.schedule.ranks)]
    for rank, (captures, order) in enumerate(found):
        slots, passes = planned.slots()[rank], planned.schedule.passes[rank]
        assert len(captures) == sum(len(set(row)) * layers[chunk] for chunk, row in enumerate(slots))
        assert Counter(order) == Counter(n * 1.0 for c in range(1, len(captures) + 1) for n in (c, -c, -c - 0.5))
        assert all(isinstance(one, int) for one in order if one > 0)
        places = {one: place for place, one in enumerate(order)}
        seen: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for place, one in enumerate(order):
            chunk, slot, layer = captures[abs(ceil(one)) - 1]
            kind = "F" if one > 0 else "B" if ceil(one) == one else "W"
            assert places[one] == place and (kind == "F" or places[{"B": -one, "W": one + 0.5}[kind]] < place)
            seen.setdefault((chunk, slot), []).append((kind, layer))
        for (chunk, slot), steps in seen.items():  # layers forwards, and backwards; W behind B where a pass fuses them
            first = slots[chunk].index(slot)
            fused = any(work.kind in (Kind.BW, Kind.FBW) and work[1:] == (first, chunk) for work in passes)
            forwards = range(layers[chunk])
            kinds = ["BW"] if fused else ["B", "W"]
            expected = [("F", layer) for layer in forwards]
            expected += [(step, layer) for pass_ in kinds for layer in reversed(forwards) for step in pass_]
            assert steps == expected
    return found


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_familys_order_has_each_graph_once(name: str) -> None:
    for ranks, microbatches in ((2, 4), (4, 8), (4, 12)):
        planned = Request(name, ranks=ranks, microbatches=microbatches).plan()
        chunks = planned.schedule.placement.chunks
        for layers in ((1,) * chunks, tuple(range(chunks)), (3,) * chunks):
            check(planned, layers)


@examples(80)
@given(st.data())
def test_any_schedules_order_has_each_graph_once(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    programs = lower(schedule, data.draw(costs_of(schedule.placement)))
    for program, stages in zip(programs, schedule.placement.stages, strict=True):
        slots = slots_of(program, stages)
        captures, order = graph_order(program, slots, [2] * len(stages))
        assert len(order) == 3 * len(captures) == 3 * 2 * sum(len(set(row)) for row in slots)


def test_the_order_of_a_rank() -> None:
    planned = Request("zb-h1", ranks=4, microbatches=6).plan()
    assert planned.slots()[3] == ((0, 1, 2, 3, 0, 1),)
    assert planned.graph_order(3, (1,)).order == (1, -1, 2, -2, 3, -3, 4, -4, -1.5, -2.5, -3.5, -4.5)
    assert planned.graph_order(0, (2,)).order[:8] == (1, 2, 3, 4, 5, 6, 7, 8)
    assert planned.graph_order(0, (2,)).order[8:12] == (-2, -1, -2.5, -1.5)
