"""What one GPU can show of the runtime: a pipeline of one rank, in a world of NCCL, trains, measures, copies and steps ahead.

Messages and collectives between ranks need several GPUs (``test_several_gpus.py``).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_gpt
import torch
from pool import Pool
from training import short_runs

from megatron.pipeline.monitor.device_progress import DeviceProgress
from megatron.pipeline.monitor.progress import Situation
from megatron.pipeline.monitor.watchdog import Watchdog

pytestmark = pytest.mark.cuda

BF16 = "--bf16 --accumulate-allreduce-grads-in-fp32"
TRAININGS = {
    "float32": "",
    "16 bits": BF16,
    "overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_are_those_of_stock(nccl: Pool, name: str) -> None:
    """The first loss bit for bit; later ones follow from weight gradients, which round differently in another kernel."""
    flags = tuple(TRAININGS[name].split())
    (ours,), (stock,) = (nccl.run(1, tiny_gpt.train, one, pp=1, iterations=3, flags=flags) for one in ("zb-h1", "stock"))
    assert ours[0][0] == stock[0][0]
    tolerance = 2e-2 if name == "16 bits" else 1e-4
    for mine, its in zip(ours, stock, strict=True):
        assert mine == pytest.approx(its, rel=tolerance)


RUNS = {
    "evaluations": "--pipeline-schedule zb-h1 --eval-interval 2 --eval-iters 2",
    "steps ahead": "--pipeline-schedule zb-h2 --post-validation --post-validation-when always --clip-grad 0",
    "undone steps": "--pipeline-schedule zb-h2 --post-validation --post-validation-when always --clip-grad 0.3",
    "copies on the host": (
        "--pipeline-schedule zb-h2 --post-validation --post-validation-when always --post-validation-copy host --clip-grad 0.3"
    ),
    "16 bits": f"--pipeline-schedule zb-h1 {BF16}",
}


@pytest.mark.parametrize("name", RUNS)
def test_the_training_program_measures_and_ends(nccl: Pool, data: str, name: str, tmp_path: Path) -> None:
    """Passes are timed by the device's events and bytes by its allocator; the loss falls."""
    path = tmp_path / "metrics.jsonl"
    flags = f"--pipeline-model-parallel-size 1 --metrics {path} --train-iters 12 {RUNS[name]}"
    assert nccl.run(1, short_runs.train, f"{data} {flags}") == [""]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["iteration"] for record in records] == list(range(1, 13))
    assert records[-1]["loss"] < records[0]["loss"]
    measured = [record["bubble_rate"] for record in records if record["bubble_rate"] is not None]
    assert measured and all(0 <= rate < 1 for rate in measured)


def test_the_devices_place_is_where_it_is_and_not_where_the_host_is() -> None:
    progress, asleep = DeviceProgress(()), 500_000_000  # clock cycles: a quarter of a second or more
    progress.launched(1)
    torch.cuda.synchronize()
    assert progress.current() is None
    torch.cuda._sleep(asleep)
    progress.launched(2)
    progress.launched(3)
    assert progress.current() == 2, "the device still sleeps"
    torch.cuda.synchronize()
    assert progress.current() is None


def watched() -> bool:
    with Watchdog(Situation):
        torch.cuda._sleep(1_000_000)
    return torch.distributed.get_backend() == "nccl"


def test_a_watchdog_begins_and_ends_over_nccl(nccl: Pool) -> None:
    assert nccl.run(1, watched) == [True]
