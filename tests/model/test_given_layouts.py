"""Every layout of stages that megatron-core allows trains: with empty stages, and with an embedding or an output layer alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiny_gpt
from pool import Pool

BOTH_OVERLAPS = "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather"
UNTIED = "--untie-embeddings-and-output-weights"


def train(pool: Pool, ranks: int, schedule: str, layout: str, *flags: str, pp: int | None = None) -> list[tiny_gpt.Step]:
    """Losses and norms on the rank that has the loss, without clipping; the rest of the world is data parallel."""
    given = ["--num-layers", str(layout.count("t")), "--pipeline-model-parallel-layout", layout, "--clip-grad", "0"]
    options: dict[str, Any] = {"pp": pp or ranks, "iterations": 2, "microbatches": 5, "flags": (*given, *" ".join(flags).split())}
    found = pool.run(ranks, tiny_gpt.train, schedule, **options)
    return next(steps for steps in reversed(found) if steps[0][0] is not None)


def one_stage(layout: str) -> str:
    return layout.replace("|", "")


def check(pool: Pool, ranks: int, schedule: str, layout: str, *flags: str) -> None:
    whole = train(pool, ranks // _pp(schedule, layout), "1f1b", one_stage(layout), *flags, pp=1)
    ours = train(pool, ranks, schedule, layout, *flags, pp=_pp(schedule, layout))
    assert [loss for loss, _ in ours] == [loss for loss, _ in whole]
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in whole], rel=1e-6)


def _pp(schedule: str, layout: str) -> int:
    stages = layout.count("|") + 1
    return stages if schedule in ("1f1b", "zb-h1") else stages // 2


@pytest.mark.parametrize(
    ("ranks", "schedule", "layout", "flags"),
    [
        (3, "zb-h1", "Et||L", UNTIED),
        (3, "zb-h1", "E|tt|L", ""),
        (3, "zb-h1", "E||ttL", UNTIED),
        (4, "zb-h1", "E|t||L", UNTIED),
        (2, "zb-v", "Et||t|L", UNTIED),
        (2, "zb-v", "E|t|t|L", ""),
        (2, "v-half", "Et|t||L", UNTIED),
        (2, "interleaved", "E||tt|L", UNTIED),
        (4, "zb-v", "E||t||t|||L", UNTIED),
        (4, "zb-v", "Et||t|L", f"{UNTIED} {BOTH_OVERLAPS}"),
        (4, "gis", "E|||tL", f"{UNTIED} {BOTH_OVERLAPS}"),
    ],
)
def test_stages_without_parameters(pool: Pool, ranks: int, schedule: str, layout: str, flags: str) -> None:
    check(pool, ranks, schedule, layout, flags)
