"""Ranks that have another plan, or other versions, than the others end with an error that names them."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest.mock import patch

import megatron.core
import pytest
import tiny_gpt
import torch
from megatron.pipeline.patches import compat
from pool import Pool

from megatron.pipeline.planner.planning.plan_cache import PlanCache
from megatron.pipeline.runtime.agreement import RanksDiffer, agree, differences


def with_one_that_differs(schedules: list[str], when: str) -> str:
    """What a rank says that planned its own entry of ``schedules``: at the start, in an iteration, or after planning again."""
    run = tiny_gpt.Run(schedules[0], pp=2)
    own = schedules[torch.distributed.get_rank()]
    other = PlanCache(replace(run.pipeline.plans._request, schedule=own))
    other.check(run.microbatches)
    if when == "again":
        run.step(0)
        run.step(1, forward_only=True)
        run.pipeline.plans.adopt({run.microbatches: other.plan(run.microbatches)})
    else:
        run.pipeline.plans = other
    try:
        run.pipeline.agree() if when == "start" else run.step(2)
    except RanksDiffer as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("when", ["start", "iteration", "again"])
def test_a_rank_with_another_plan_is_named(when: str, pool: Pool) -> None:
    for message in pool.run(2, with_one_that_differs, ["1f1b", "zb-h1"], when):
        assert message.startswith("the ranks do not run the same plan: global rank 1 on ")
        assert re.search(r": plan of 4 microbatches [0-9a-f]{16}, but 1 of 2 ranks have [0-9a-f]{16}", message)


def test_equal_ranks_agree(pool: Pool) -> None:
    assert pool.run(2, with_one_that_differs, ["zb-h1", "zb-h1"], "again") == ["no error"] * 2


def with_another_core(versions: list[str]) -> str:
    """What a rank says that runs its own release of megatron-core, such as a checkout's, whatever pip has installed."""
    compat.version.cache_clear()
    try:
        with patch.object(megatron.core, "__version__", versions[torch.distributed.get_rank()]):
            agree({})
    except RanksDiffer as error:
        return str(error)
    finally:
        compat.version.cache_clear()
    return "no error"


def test_the_release_that_runs_is_compared_and_not_the_one_that_pip_has(pool: Pool) -> None:
    for message in pool.run(2, with_another_core, ["0.19.1+a0ba972", "0.18.2"]):
        assert ": megatron-core 0.18.2, but 1 of 2 ranks have 0.19.1;" in message or message.count("0.19.1") == 1


def test_the_commit_that_a_release_names_does_not_count(pool: Pool) -> None:
    """It is that of any git repository around the package, and missing where there is no git."""
    assert pool.run(2, with_another_core, ["0.19.1+a0ba972", "0.19.1"]) == ["no error"] * 2


def test_every_difference_is_named_by_the_ranks_that_are_in_the_minority() -> None:
    most, old = {"megatron-core": "0.19.2", "plan": "a"}, {"megatron-core": "0.18.2", "plan": "b", "offload": "c"}
    message = differences(["node1", "node1", "node2", "node2"], [most, most, most, old])
    assert "global rank 3 on node2: megatron-core 0.18.2, but 3 of 4 ranks have 0.19.2; global rank 3 on node2: plan b" in message
    assert "global rank 3 on node2: offload c, but 3 of 4 ranks have none" in message
    assert message.endswith("Install the same versions and give the same files on all nodes")
