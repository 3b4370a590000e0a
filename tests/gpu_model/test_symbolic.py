"""The judge on programs as they are lowered: every family, by sizes and extras, in milliseconds each, without a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from pool import Pool

from gpu_model.judge import SETTINGS, judge
from gpu_model.recorded import recording
from gpu_model.symbolic import traces
from gpu_model.trace import Item, Post
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import EQUAL_SHARDS, Costs, uniform
from megatron.pipeline.planner.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Posting, Program

SPREAD = [name for name, family in families.FAMILIES.items() if family.splits == 1]
EXTRAS = [None, *Vocabulary, Offload.FULL]
MICROBATCHES = {2: 4, 4: 6, 8: 5}  # by ranks


@cache
def planned(name: str, ranks: int, extra: Vocabulary | Offload | None = None) -> tuple[Schedule, Costs]:
    costs = uniform(families.placement(name, ranks), hop=0.05)
    vocabulary, offload = (extra, None) if isinstance(extra, Vocabulary) else (None, extra)
    if vocabulary:
        costs = replace(costs, vocabulary=EQUAL_SHARDS)
    return planning.plan(name, ranks, MICROBATCHES[ranks], costs, vocabulary=vocabulary, offload=offload), costs


@cache
def programs(name: str, ranks: int, extra: Vocabulary | Offload | None = None) -> tuple[Program, ...]:
    return lower(*planned(name, ranks, extra))


def stuck_in(iterations: Sequence[Sequence[Program]], undone: bool = False) -> list[str]:
    """The deadlocks, with both ways to post messages, where all of a group is in order and all of a rank is in one queue.

    What ends so ends under the other settings, too: each has a part of these orders, and no communicators are made on the way.
    """
    strictest = SETTINGS["eager, one queue"]
    return [line for posting in Posting for line in judge(traces(iterations, posting, undone), strictest).deadlock]


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_familys_programs_end(name: str) -> None:
    for ranks, extra in product(MICROBATCHES, EXTRAS if name in SPREAD else [None]):
        assert stuck_in([programs(name, ranks, extra)]) == [], (ranks, extra)


@pytest.mark.parametrize("name", SPREAD)
def test_steps_that_are_undone_end(name: str) -> None:
    """Of two iterations each is abandoned at its first backward, and run again."""
    for ranks, extra in ((2, None), (4, Vocabulary.ONE_BARRIER)):
        assert stuck_in([programs(name, ranks, extra)] * 2, undone=True) == [], (ranks, extra)


@pytest.mark.parametrize(("before", "after"), [("zb-v", "v-half"), ("1f1b", "zb-h2"), ("v-min", "zb-v")])
def test_another_plan_after_an_iteration_ends(before: str, after: str) -> None:
    for ranks in MICROBATCHES:
        assert stuck_in([programs(before, ranks), programs(after, ranks)]) == []


def iteration(schedule: str) -> tuple[list[Item], list[Item]]:
    """The trace of an iteration, and that of its program."""
    import tiny_gpt
    import torch

    run = tiny_gpt.Run(schedule, pp=2, microbatches=8)
    run.step(0)
    with recording() as trace:
        run.forward_backward(1)
    return trace, traces([run.pipeline.plans.plan(8).programs])[torch.distributed.get_rank()]


def messages(trace: list[Item]) -> list[str]:
    """What is sent and received, in the host's order."""
    return [f"{item.what} {item.parts[0].peer}" for item in trace if isinstance(item, Post) and item.alone]


def test_a_programs_trace_has_the_messages_of_a_training(gpus: Pool) -> None:
    for recorded, symbolic in gpus.run(2, iteration, "zb-v"):
        assert messages(recorded) == messages(symbolic) != []
