"""Plans that count what ranks do between two iterations train with the numbers of megatron-core's own schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_gpt
from marked import rest
from pool import Pool
from reductions import costs

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.problem import Objective

GATHERS = "--overlap-param-gather"
BOTH = f"--use-distributed-optimizer --overlap-grad-reduce {GATHERS} --ddp-bucket-size 4096"
MICROBATCHES = 6
SMALL = "--num-layers 4 --hidden-size 16 --num-attention-heads 2"


def test_reductions_change_the_order_of_the_last_weight_gradients() -> None:
    """What the trainings below run is not what they would run without."""
    for name in ("zb-v", "v-half"):
        made = costs(name, 2)
        plain = replace(made, stages=tuple(replace(one, reduce=None, step=None, gather=None) for one in made.stages))
        orders = [planning.Request(name, 2, MICROBATCHES, each, objective=Objective.MAKESPAN).plan() for each in (made, plain)]
        assert orders[0].schedule.passes != orders[1].schedule.passes
        assert orders[0].schedule.boundary and not orders[1].schedule.boundary


def train(schedule: str, flags: str, iterations: int, overlaps: str = BOTH, pp: int = 2, tp: int = 1) -> list[tiny_gpt.Step]:
    found: list[tiny_gpt.Step] = tiny_gpt.train(
        schedule,
        pp=pp,
        tp=tp,
        microbatches=MICROBATCHES,
        iterations=iterations,
        flags=(*overlaps.split(), *SMALL.split(), *flags.split()),
    )
    return found


def losses(found: list[list[tiny_gpt.Step]]) -> list[list[float]]:
    """By iteration, those of all replicas."""
    return [sorted(loss for loss, _ in steps if loss is not None) for steps in zip(*found, strict=True)]


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        rest("zb-v", ""),
        ("zb-v", "--untie-embeddings-and-output-weights"),
        ("v-half", "--fp16 --initial-loss-scale 1048576 --hysteresis 1"),
        rest("zb-v", "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --disable-bias-linear"),
    ],
)
def test_losses_are_those_of_stock(pool: Pool, tmp_path: Path, schedule: str, flags: str) -> None:
    """PP 2 and DP 2; with float16 the first two steps overflow."""
    (file := tmp_path / "costs.json").write_text(costs(schedule, 2).to_json())
    flags = f"--clip-grad 0 {flags}"  # buckets and placements add the squares of a norm up in other orders
    ours, expected = (
        pool.run(4, train, *given, 4) for given in ((schedule, f"{flags} --pipeline-costs {file}"), ("stock", flags))
    )
    planned, stock = losses(ours), losses(expected)
    assert planned == stock and all(len(both) == 2 for both in stock)
    assert [norm for _, norm in ours[0]].count(None) == (2 if "fp16" in flags else 0)


def test_clipped_steps_are_those_of_all_weights_at_once(pool: Pool, tmp_path: Path) -> None:
    """Norms too. Without gathers during forwards upstream steps all weights, and then gathers them."""
    (file := tmp_path / "costs.json").write_text(costs("zb-v", 2).to_json())
    flags = f"--pipeline-costs {file} --clip-grad 0.1"
    by_bucket, at_once = (pool.run(4, train, "zb-v", flags, 5, overlaps) for overlaps in (BOTH, BOTH.replace(GATHERS, "")))
    assert by_bucket == at_once
    assert min(norm for _, norm in at_once[0]) > 0.1


@pytest.mark.rest
def test_steps_ahead_that_are_taken_back_gather_again(pool: Pool, tmp_path: Path) -> None:
    """Post-validation: every step is clipped, behind gathers of another one."""
    (file := tmp_path / "costs.json").write_text(costs("zb-v", 2).to_json())
    flags = f"--pipeline-costs {file} --clip-grad 0.1 --post-validation --post-validation-when always"
    by_bucket, at_once = (pool.run(4, train, "zb-v", flags, 6, overlaps) for overlaps in (BOTH, BOTH.replace(GATHERS, "")))
    assert by_bucket == at_once
    assert min(norm for _, norm in at_once[0]) > 0.1
