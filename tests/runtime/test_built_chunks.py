"""Chunks that were built for another placement than the schedule's are refused, in one line and on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
import torch
from megatron.core.utils import unwrap_model
from pool import Pool

from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.placement import v
from megatron.pipeline.runtime.agreement import Built, misplaced
from megatron.pipeline.runtime.pipeline import Pipeline


def train(schedule: str, built_for: str, pp: int, change: str = "", flags: str = "") -> str:
    """What a rank says whose chunks are those of another schedule's placement."""
    run = tiny_gpt.Run(built_for, pp=pp, flags=("--num-layers", "8", *flags.split()))
    if schedule != built_for:
        Pipeline(Request(schedule, pp, run.microbatches)).install()
    modules: list[Any] = [unwrap_model(chunk) for chunk in run.chunks]
    if change == "order" and torch.distributed.get_rank() == 1:
        for layer in modules[0].decoder.layers:
            layer.layer_number += 1
    try:
        run.step(0, forward_only=True)
    except (ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("schedule", "built_for", "pp", "has", "wanted"),
    [("zb-v", "interleaved", 2, 1, 0), ("zb-v", "interleaved", 4, 3, 0), ("gis", "zb-v", 4, 0, 3)],
)
def test_ends_of_the_model_on_other_ranks(pool: Pool, schedule: str, built_for: str, pp: int, has: int, wanted: int) -> None:
    messages = pool.run(pp, train, schedule, built_for, pp)
    assert len(set(messages)) == 1 and "\n" not in messages[0]
    assert messages[0].startswith(
        f"ValueError: chunk 1 of pipeline rank {has} has the output layer, and schedule {schedule} has it in chunk 1 of rank "
        f"{wanted}: build the chunks for the schedule's placement, "
    )


def test_layers_in_another_order(pool: Pool) -> None:
    messages = pool.run(2, train, "zb-h1", "zb-h1", 2, "order")
    assert len(set(messages)) == 1
    assert messages[0].startswith(
        "ValueError: chunk 0 of pipeline rank 1 has layers 6, 7, 8, 9, and schedule zb-h1 has layer 5 and what follows it there: "
    )


@pytest.mark.parametrize(("schedule", "flags"), [("zb-v", "--bf16"), ("zb-v", "--vocab-parallel 2"), ("interleaved", "")])
def test_chunks_of_its_own_placement(pool: Pool, schedule: str, flags: str) -> None:
    assert pool.run(2, train, schedule, schedule, 2, "", flags) == ["no error"] * 2


def test_chunks_that_say_nothing_are_taken_as_they_are() -> None:
    silent, first, second = Built((False, False), None), Built((True, False), ()), Built((False, False), (1, 2))
    third, last = Built((False, False), ()), Built((False, True), (4,))
    assert misplaced([[silent, silent], [silent, silent]], v(2), "zb-v") is None
    assert misplaced([[first, silent], [second, silent]], v(2), "zb-v") is None
    assert misplaced([[first, last], [second, silent]], v(2), "zb-v") is None
    found = misplaced([[first, last], [second, third]], v(2), "zb-v")
    assert found == "chunk 1 of pipeline rank 0 has layers 4, and schedule zb-v has layer 3 and what follows it there"
