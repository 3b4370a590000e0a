"""Reports of an iteration: records survive as numbers, and reach every rank while other iterations run."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import schedule_strategies
import tiny_gpt
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool

from megatron.pipeline.monitor.recorder import Record, Waited
from megatron.pipeline.monitor.report import RecordFormat
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning.planned import Planned, Variant
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Compute, Program, Send, Wait


def record_of(program: Program, chance: random.Random) -> Record:
    """One that an executor could make: all waits of the program, then some of its sends in any order."""

    def times() -> tuple[float, float]:
        return chance.uniform(1.7e9, 1.9e9), chance.uniform(1.7e9, 1.9e9)

    passes = tuple(Timed(one.work, *times()) for one in program if isinstance(one, Compute))
    waits = [one.message for one in program if isinstance(one, Wait)]
    sends = [one.message for one in program if isinstance(one, Send)]
    finished = chance.sample(sends, chance.randint(0, len(sends)))
    held = tuple(chance.randint(-(2**20), 2**52) for _ in passes)  # an allocator may hold less than at the beginning
    return Record(passes, tuple(Waited(one, *times()) for one in waits + finished), held, chance.randint(0, 2**52))


@examples(30)
@given(schedule=schedule_strategies.schedules(), seed=st.integers())
def test_records_are_the_same_after_a_journey_as_numbers(schedule: Schedule, seed: int) -> None:
    programs = lower(schedule, uniform(schedule.placement))
    formats = [RecordFormat(program) for program in programs]
    length = max(one.length for one in formats)
    for one, program in zip(formats, programs, strict=True):
        record = record_of(program, random.Random(seed))
        sent = torch.tensor(one.encode(record, length), dtype=torch.float64)
        assert len(sent) == length
        assert one.decode(sent.tolist()) == record


def test_a_record_of_another_run_is_refused() -> None:
    schedule = planning.plan("zb-v", 2, 4)
    program = lower(schedule, uniform(schedule.placement))[0]
    record, one = record_of(program, random.Random(0)), RecordFormat(program)
    with pytest.raises(ValueError, match="26 passes, which are not the 24 of the program"):
        one.encode(dataclasses.replace(record, passes=record.passes[:2] + record.passes), one.length)


def reports(schedule: str) -> tuple[Any, Any, list[bool]]:
    """What a report says that was started before other iterations and waited for after them, and what the ranks recorded."""
    run = tiny_gpt.Run(schedule, pp=4, flags=("--num-layers", "8"))
    pipeline: Any = run.pipeline
    run.step(0)
    everyone: list[Any] = [None] * 4
    torch.distributed.all_gather_object(everyone, pipeline._measured[0].record())
    pending = pipeline.start_report()
    used = pipeline.plans.planned[4]
    other = planning.plan("1f1b-v" if schedule == "zb-v" else "zb-h1", 4, 4)
    planned = Planned(other, Problem(other.placement, 4, uniform(other.placement)), Variant(other.name))
    pipeline.plans.adopt({4: planned}, planned.problem.costs, 100.0)
    run.step(1, forward_only=True)
    run.step(2)
    report = pending.wait()
    after = pipeline.report()
    ran = [one.schedule.passes == planned.passes for one, planned in ((report, used), (after, other))]
    return tuple(everyone), report.ranks, ran


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_report_is_what_the_ranks_recorded_in_its_iteration(pool: Pool, schedule: str) -> None:
    for recorded, reported, ran in pool.run(4, reports, schedule):
        assert reported == recorded
        assert ran == [True, True]


def before_anyone_ends(schedule: str) -> list[bool]:
    """Rank 0 goes on with what only then lets rank 1 start its report."""
    run: Any = tiny_gpt.Run(schedule, pp=2)
    run.step(0)
    rank, token = torch.distributed.get_rank(), torch.zeros(1)
    if rank == 1:
        torch.distributed.recv(token, 0)
    pending = run.pipeline.start_report()
    if rank == 0:
        torch.distributed.send(token, 1)
    return [record.peak_activation_bytes > 0 for record in pending.wait().ranks]


def test_no_rank_waits_for_another_to_start_a_report(pool: Pool) -> None:
    assert pool.run(2, before_anyone_ends, "zb-h1") == [[True, True]] * 2
