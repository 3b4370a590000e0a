"""B hides its collectives between tensor-parallel ranks: on the device model each has work between its start and its wait."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from pool import Pool
from runtime.shielded import costs

from gpu_model.recorded import trained
from gpu_model.trace import Follow, Kernels, Post

PARALLEL = "--sequence-parallel --disable-bias-linear --untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --moe-router-topk 2"


def shielding(schedule: str, flags: str, unmade: str = "") -> tuple[int, int]:
    """How many input gradients are summed over tensor-parallel ranks in an iteration, and how many of these sums run behind
    kernels of their own rank.

    Args:
        unmade: a function of ``weight_tasks`` that does nothing.
    """
    from megatron.pipeline.backward import weight_tasks

    patched = patch.object(weight_tasks, unmade, lambda: None) if unmade else patch.dict({})
    with patched:
        trace = trained(schedule, pp=2, tp=2, microbatches=8, iterations=1, flags=tuple(flags.split()))
    sums = [moment for moment, item in enumerate(trace) if isinstance(item, Post) and _is_sum(item)]
    hidden = 0
    for moment in sums:
        waits = next(at for at, item in enumerate(trace) if isinstance(item, Follow) and item.moment == moment)
        hidden += any(isinstance(item, Kernels) for item in trace[moment + 1 : waits])
    return len(sums), hidden


def _is_sum(post: Post) -> bool:
    return (
        post.asynchronous and post.place.startswith(("distributed/sequence.py", "backward/linear.py")) and "reduce" in post.what
    )


@pytest.mark.parametrize(
    ("schedule", "stages", "flags"),
    [("zb-h1", 2, ""), ("zb-v", 4, ""), ("v-half", 4, ""), ("zb-auto", 2, ""), ("zb-h1", 2, EXPERTS), ("zb-v", 4, EXPERTS)],
)
def test_every_sum_of_input_gradients_runs_behind_work(
    gpus: Pool, tmp_path: Path, schedule: str, stages: int, flags: str
) -> None:
    given = f"{PARALLEL} {flags}"
    sums = 8 * 2 * (1 if flags else 2)  # of 8 microbatches in 2 layers of a rank: in attention, and in the MLP
    for found, hidden in gpus.run(4, shielding, schedule, f"{given} {costs(tmp_path, stages)}"):
        assert found >= sums and hidden == found
    for found, hidden in gpus.run(4, shielding, schedule, given):
        assert found >= sums and not hidden


def test_a_sum_without_work_behind_it_is_found(gpus: Pool, tmp_path: Path) -> None:
    for found, hidden in gpus.run(4, shielding, "zb-v", f"{PARALLEL} {costs(tmp_path, 4)}", "reduction_begins"):
        assert found >= 32 and hidden <= 8, "but for the output layer's, which runs behind its own"
