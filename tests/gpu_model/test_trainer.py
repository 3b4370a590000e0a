"""The training program on the device model: nothing that runs beside the passes races with them, or keeps a rank waiting."""

from __future__ import annotations

import pytest
from marked import whole
from pool import Pool

from gpu_model.recorded import racing, recording, stuck
from gpu_model.trace import Item

TWO = "--pipeline-model-parallel-size 2"
RUNS = {
    "measured": "--pipeline-schedule zb-h1 --metrics /dev/null",
    "evaluations": "--pipeline-schedule v-half --eval-interval 2 --eval-iters 2",
    "profile": "--pipeline-schedule zb-v --pipeline-costs profile --train-iters 12",
    "offload profile": "--pipeline-schedule zb-v --offload full --offload-min-size 0.1KiB --offload-profile --train-iters 10",
    "steps ahead": "--pipeline-schedule zb-h2 --post-validation --post-validation-when always --clip-grad 0",
    "copies on the host": (
        "--pipeline-schedule zb-h2 --post-validation --post-validation-when always --post-validation-copy host --clip-grad 0.3"
    ),
    "undone steps": "--pipeline-schedule zb-h2 --post-validation --post-validation-when always --clip-grad 0.3",
    "16 bits": "--pipeline-schedule v-half --bf16 --accumulate-allreduce-grads-in-fp32",
    "interlaced": "--pipeline-schedule 1f1b --vocab-parallel interlaced --untie-embeddings-and-output-weights",
    "tied": "--pipeline-schedule zb-v --vocab-parallel 2",
}


def races(flags: str, train: str = "train") -> list[str]:
    """Of a whole training.

    Args:
        train: how, by name: a function of ``short_runs``.
    """
    from training import short_runs

    with racing() as found:
        error = getattr(short_runs, train)(flags)
    assert not error, error
    return found


def races_and_trace(flags: str) -> tuple[list[str], list[Item]]:
    with recording() as trace:
        return races(flags), trace


PART = ("16 bits", "interlaced", "offload profile", "profile", "undone steps")  # which have what the others have, but one by one


@pytest.mark.parametrize("name", [*PART, *(whole(name) for name in RUNS if name not in PART)])
def test_nothing_races_or_waits_for_ever(gpus: Pool, data: str, name: str) -> None:
    found = gpus.run(2, races_and_trace, f"{data} {TWO} {RUNS[name]}")
    assert [races for races, _ in found] == [[], []]
    assert stuck([trace for _, trace in found]) == []
