"""Plans that count what ranks do between two iterations train with the numbers of megatron-core's own schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
from pool import Pool

from megatron.pipeline import planning
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import uniform
from megatron.pipeline.schedule.core.problem import Objective

BOTH = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4096"
MICROBATCHES = 6
SMALL = "--num-layers 4 --hidden-size 16 --num-attention-heads 2"


def costs(name: str, ranks: int) -> Any:
    """Of passes, with long reductions and gathers."""
    given = uniform(families.placement(name, ranks), forward=1, backward=1, weight=1)
    stages = tuple(replace(stage, reduce=4.0, step=0.2, gather=2.0) for stage in given.stages)
    return replace(given, stages=stages, norm=0.1)


def test_reductions_change_the_order_of_the_last_weight_gradients() -> None:
    """What the trainings below run is not what they would run without."""
    for name in ("zb-v", "v-half"):
        made = costs(name, 2)
        plain = replace(made, stages=tuple(replace(one, reduce=None, step=None, gather=None) for one in made.stages))
        orders = [planning.Request(name, 2, MICROBATCHES, each, objective=Objective.MAKESPAN).plan() for each in (made, plain)]
        assert orders[0].schedule.passes != orders[1].schedule.passes
        assert orders[0].schedule.boundary and not orders[1].schedule.boundary


def train(schedule: str, flags: str, iterations: int) -> list[tiny_gpt.Step]:
    found: list[tiny_gpt.Step] = tiny_gpt.train(
        schedule, pp=2, microbatches=MICROBATCHES, iterations=iterations, flags=(*BOTH.split(), *SMALL.split(), *flags.split())
    )
    return found


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        ("zb-h1", ""),
        ("zb-v", "--clip-grad 0"),
        ("zb-v", "--clip-grad 0 --untie-embeddings-and-output-weights"),
        ("v-half", "--clip-grad 0 --fp16 --initial-loss-scale 4294967296 --hysteresis 1"),
        ("zb-v", "--clip-grad 0 --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --disable-bias-linear"),
    ],
)
def test_fifty_iterations_have_the_losses_of_stock(pool: Pool, tmp_path: Path, schedule: str, flags: str) -> None:
    """PP 2 and DP 2; with float16 the first steps overflow. On a line the norms, and clipping, too."""
    (file := tmp_path / "costs.json").write_text(costs(schedule, 2).to_json())
    planned = pool.run(4, train, schedule, f"{flags} --pipeline-costs {file}", 50)
    for ours, stock in zip(planned, pool.run(4, train, "stock", flags, 50), strict=True):
        assert [loss for loss, _ in ours if loss is not None] == [loss for loss, _ in stock if loss is not None] or not any(
            loss is not None for loss, _ in stock
        )
        if schedule == "zb-h1":
            assert ours == stock
