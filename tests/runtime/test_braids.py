"""Braided schedules train as megatron-core's own 1F1B does, with or without anything that runs concurrently in a braid."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gpt
from pool import Pool

from megatron.pipeline import planning
from megatron.pipeline.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.schedule.core.kinds import Kind
from megatron.pipeline.schedule.core.problem import Problem
from megatron.pipeline.schedule.transforms.braid import braid


class Hiding(Costs):
    """Costs with which braids pay."""

    def braid(self, stage: int, kind: Kind, other: int) -> tuple[float, float]:
        return 0.6 * self.seconds(Kind.F, stage), 0.6 * self.seconds(kind, other)


@pytest.mark.parametrize(("name", "pp"), [("zb-v", 2), ("v-half", 4), ("dualpipe-v", 4), ("interleaved", 2)])
def test_a_braided_schedule_trains_as_stock(pool: Pool, tmp_path: Path, name: str, pp: int) -> None:
    schedule = planning.plan(name, pp, 2 * pp)
    costs = Hiding((StageCosts(1.0, 1.0, 1.0),) * (schedule.placement.last_stage + 1))
    braided = braid(schedule, Problem(schedule.placement, schedule.microbatches, costs))
    assert any(row.is_braided for row in braided.rows)
    (tmp_path / "braided.json").write_text(braided.to_json())
    flags = ("--num-layers", "8", "--clip-grad", "0", "--lr", "1e-3")
    ours, stock = (
        pool.run(pp, tiny_gpt.train, one, pp=pp, microbatches=2 * pp, iterations=3, flags=flags)
        for one in (f"file:{tmp_path}/braided.json", "stock")
    )
    assert losses(ours) == losses(stock)
    assert len(set(losses(ours))) == 3


def losses(ranks: list[list[tiny_gpt.Step]]) -> list[float | None]:
    """On the rank that has them."""
    return next([loss for loss, _ in steps] for steps in ranks if steps[0][0] is not None)
