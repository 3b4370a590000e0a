"""An own loop with another number of microbatches in every step: DDP, which learns in the first step when a bucket is complete,
reduces each bucket once, behind its last gradient."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from marked import rest, whole
from pool import Pool, RankFailed
from runtime import varying

BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 100}
BOTH = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
DAILY = ("zb-v", "bare", True)
LATER = {
    ("zb-h1", "megatron", True),
    ("zb-v", "megatron", False),
    ("zb-h1", "bare", False),
    ("v-half", "aligned", False),
    ("v-half", "deferred", True),
}


@pytest.mark.parametrize(
    ("schedule", "loop", "both"),
    [
        case if case == DAILY else rest(*case) if case in LATER else whole(*case)
        for schedule in ("zb-h1", "zb-v", "v-half")
        for loop in ("megatron", "aligned", "bare", "deferred")
        for both in (False, True)
        for case in [(schedule, loop, both)]
    ],
)
def test_equals_the_run_without_overlap(pool: Pool, schedule: str, loop: str, both: bool) -> None:
    first = varying.MOST if both else 1
    assert any(pool.run(4, varying.beside, schedule, 2, first, loop, timeout=300, **(BOTH if both else BUCKETS)))


@pytest.mark.parametrize(("schedule", "ranks"), [rest("zb-v", 8), ("zb-h1", 4), whole("v-half", 8)])
def test_four_pipeline_ranks(pool: Pool, schedule: str, ranks: int) -> None:
    assert any(pool.run(ranks, varying.beside, schedule, 4, 3, "bare", timeout=300, **BOTH))


@pytest.mark.rest
def test_megatron_core_alone_reduces_early_where_a_loop_gives_no_function(pool: Pool) -> None:
    """The public bug of frameworks, which is no matter of schedules."""
    with pytest.raises(
        RankFailed, match=r"\d+ microbatches: .*, and not |Communication call has not been issued for this bucket"
    ):
        pool.run(4, varying.beside, "stock", 2, 2, "bare", timeout=300, **BUCKETS)
    assert any(pool.run(4, varying.beside, "stock", 2, 2, "megatron", timeout=300, **BUCKETS))


def kept_by_reports(schedule: str) -> int:
    """The most microbatches of which a report with its graph would keep what no backward frees."""
    own, made, most = varying.Own(varying.start(schedule, 2)), [], [0]

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, Any]:
        inner = output.exp()
        made.append(weakref.ref(inner))
        most.append(sum(one() is not None for one in made))
        return output.mean(), {"beside": (inner.sin().sum(), "text")}

    own.loss = loss
    for forward_only in (True, False):
        reported = own.call(0, 8, forward_only)
        assert all(one["beside"][1] == "text" and not one["beside"][0].requires_grad for one in reported)
    return max(most)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_reports_keep_no_graphs(pool: Pool, schedule: str) -> None:
    assert sorted(pool.run(2, kept_by_reports, schedule)) == [0, 1]
