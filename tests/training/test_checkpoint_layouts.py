"""A checkpoint written under one schedule, placement and layout goes on under any other, stock included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from training.short_runs import metrics, train

FLAGS = "--split 100,0,0 --num-layers 8 --pipeline-model-parallel-size 2 --clip-grad 0"


def contents(directory: str) -> dict[str, Any]:
    """Every tensor of a checkpoint as a list of numbers, by its global name."""
    from megatron.pipeline import patches

    patches.install()
    import torch
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_plain_tensors(directory)
    return {name: tensor.float().flatten().tolist() for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize(
    ("ranks", "flags", "chain"),
    [
        (2, "", ("1f1b", "v-half", "interleaved", "stock", "zb-v", "1f1b")),
        (
            4,
            "--use-distributed-optimizer --untie-embeddings-and-output-weights --num-layers 9",
            ("interleaved", "stock", "v-half", "1f1b"),
        ),
    ],
    ids=["tied", "distributed-optimizer-untied-uneven"],
)
def test_round_trip(pool: Pool, data: str, tmp_path: Path, ranks: int, flags: str, chain: tuple[str, ...]) -> None:
    """One iteration under each schedule in turn: losses, weights and optimizer state are those of an uninterrupted run."""
    run = f"{data} {FLAGS} {flags} --train-iters {len(chain)}"
    for iteration, schedule in enumerate(chain, 1):
        chunks = "--num-virtual-stages-per-pipeline-rank 2" if (schedule, ranks) == ("stock", 2) else ""
        here = f"--pipeline-schedule {schedule} {chunks} --save {tmp_path}/chain --load {tmp_path}/chain"
        errors = pool.run(ranks, train, f"{run} {here} --exit-interval {iteration} --metrics {tmp_path}/chain.jsonl")
        assert errors == [""] * ranks
    whole = f"{run} --pipeline-schedule 1f1b --save {tmp_path}/whole --metrics {tmp_path}/whole.jsonl"
    assert pool.run(ranks, train, whole) == [""] * ranks
    losses = [[(iteration, loss) for iteration, loss, _ in metrics(tmp_path / name)] for name in ("chain.jsonl", "whole.jsonl")]
    assert losses[0] == losses[1] and len(losses[0]) == len(chain)
    last = f"iter_{len(chain):07}"
    passed_on, uninterrupted = (pool.run(1, contents, str(tmp_path / name / last))[0] for name in ("chain", "whole"))
    assert passed_on.keys() == uninterrupted.keys() and len(passed_on) > 10
    for name, numbers in uninterrupted.items():
        assert passed_on[name] == numbers, name
