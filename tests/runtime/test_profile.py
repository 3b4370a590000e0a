"""Costs from measured iterations are those that the iterations took."""

from __future__ import annotations

import itertools
from dataclasses import replace
from statistics import median

import pytest
import torch
from pool import Pool

from megatron.pipeline.monitor.cost_profile import agree, beside_communication, measured_costs
from megatron.pipeline.monitor.recorder import Record
from megatron.pipeline.monitor.report import Report
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts, VocabularyCosts
from megatron.pipeline.planner.schedule.core.cutting import with_parts
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.time.simulate import activation_changes, activation_profile, simulate
from megatron.pipeline.runtime.ping import ping_all
from megatron.pipeline.runtime.profiling import in_words


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "interleaved", "seq-1f1b"])
@pytest.mark.parametrize("recompute", [(), (0,)], ids=["", "recompute"])
def test_costs_come_back(name: str, recompute: tuple[int, ...]) -> None:
    placement = families.placement(name, 4)
    costs = Costs(tuple(StageCosts(2 + i, 4.0, 4.0, 8, 8, 8.0, 2.0 + i) for i in range(placement.last_stage + 1)), hop=0.5)
    if name in ("zb-h1", "v-half"):
        costs = Costs(tuple(StageCosts(2 + i, 3.0, 4.0, 8, 4, None, 2.0 + i) for i in range(placement.last_stage + 1)), hop=0.5)
    if recompute:
        first = costs.stages[0]
        values = (first.forward, first.backward, first.weight, 8, first.retained, first.fused, 7.0, 2)
        costs = Costs((StageCosts(*values), *costs.stages[1:]), 0.5)
    schedule = planning.plan(name, 4, 6, costs, recompute=recompute)
    timeline = simulate(schedule, costs)
    held = [tuple(itertools.accumulate(changes)) for changes in activation_changes(schedule, costs)]
    ranks = zip(timeline.ranks, held, strict=True)
    report = Report(tuple(Record(passes, (), bytes_, max(bytes_)) for passes, bytes_ in ranks), schedule)  # type: ignore[arg-type]
    found = measured_costs([report, report], report)
    for stage, expected in zip(found.stages, costs.stages, strict=True):
        assert vars(stage) == pytest.approx(vars(expected))
    assert report.memory == activation_profile(schedule, timeline, costs)


@pytest.mark.parametrize("name", ["interleaved", "dualpipe-v"])
@pytest.mark.parametrize("factor", [1.0, 1.3, 4.0])
def test_braids_say_what_communication_takes_from_computation(name: str, factor: float) -> None:
    stages = families.placement(name, 4).depth
    costs = with_parts(Costs((StageCosts(3.0, 3.5, 3.5),) * stages, beside_communication=factor))
    planned = Request(name, 4, 12, replace(costs, beside_communication=1.0), overlap=True).plan()
    assert planned.braids

    def report(schedule: Schedule) -> Report:
        rows = simulate(schedule, costs).ranks
        return Report(tuple(Record(row, (), (0,) * len(row), 0) for row in rows), schedule)  # type: ignore[arg-type]

    found = measured_costs([report(planned.schedule)], report(planned.schedule))
    assert beside_communication([report(planned.schedule)], found) == pytest.approx(factor, abs=2e-3)
    plain = report(planning.plan(name, 4, 12, costs))
    assert beside_communication([plain], found) == 1


def test_what_was_measured_inin_words() -> None:
    stage = StageCosts(0.002, 0.003, 0.001, activation=2**20, retained=2**19)
    dense = Costs((stage, stage), 1e-4)
    assert in_words(dense) == "F 2, B 3, W 1 ms per stage, hop 0.1 ms; F holds 1 MiB, of which 0.5 until W"
    spread = replace(dense, vocabulary=VocabularyCosts(4e-4, 3e-4, 2e-4, 1e-4))
    assert in_words(spread) == f"{in_words(dense)}; of the vocabulary S 0.4, T 0.3, IF 0.2, IB 0.1 ms per rank, collective 0.1 ms"
    spread = replace(spread, vocabulary=replace(spread.vocabulary, exchange=5e-4))
    assert in_words(spread).endswith("collective 0.5 ms")


def collectives() -> tuple[list[float], float | None]:
    """What this rank measures of a collective, and what all ranks agree on."""
    seconds = ping_all(torch.distributed.new_group(), torch.zeros(4))
    costs = agree(Costs((StageCosts(1.0, 1.0, 1.0),) * 2), [], seconds)
    return seconds, costs.vocabulary.exchange


def test_a_collective_of_the_vocabulary_is_measured_and_agreed_on(pool: Pool) -> None:
    (first, agreed), (second, same) = pool.run(2, collectives)
    assert len(first) == 5 and min(first) > 0 and not second
    assert agreed == same == median(first)
