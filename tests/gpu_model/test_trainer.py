"""The training program on the device model: nothing that runs beside the passes races with them, or keeps a rank waiting."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from marked import whole
from pool import Pool

from gpu_model.mutations import RUNS, Around
from gpu_model.recorded import racing, recording, stuck
from gpu_model.trace import Item


def races(flags: str) -> list[str]:
    """Of a whole training."""
    from training.short_runs import train

    with racing() as found:
        error = train(flags)
    assert not error, error
    return found


def races_and_trace(flags: str, around: Around = nullcontext) -> tuple[list[str], list[Item]]:
    with around(), recording() as trace:
        return races(flags), trace


# What the others have, but one by one.
PART = ("16 bits", "interlaced", "offload profile", "profile", "undone")


@pytest.mark.parametrize("name", [*PART, *(whole(name) for name in RUNS if name not in PART)])
def test_nothing_races_or_waits_for_ever(gpus: Pool, data: str, name: str) -> None:
    with_flags = f"{data} --train-iters 4 {RUNS[name].flags}"
    found = gpus.run(RUNS[name].ranks, races_and_trace, with_flags, RUNS[name].around)
    assert [races for races, _ in found] == [[]] * RUNS[name].ranks
    assert stuck([trace for _, trace in found]) == []
