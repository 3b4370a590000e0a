"""A checkpoint written under one schedule, placement and layout goes on under any other, stock included; and at any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from marked import rest
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.pipeline.patches import distrib_optimizer
from pool import Pool
from training.short_runs import metrics, train

from megatron.pipeline.session.checkpoints import TRACKER
from megatron.pipeline.trainer import checkpoint

FLAGS = "--split 100,0,0 --num-layers 8 --pipeline-model-parallel-size 2 --clip-grad 0"


def contents(directory: str) -> dict[str, Any]:
    """Every tensor of a checkpoint as a list of numbers, by its global name."""
    found = dist_checkpointing.load_plain_tensors(directory)
    return {name: tensor.float().flatten().tolist() for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize(
    ("ranks", "flags", "chain"),
    [
        rest(2, "", ("1f1b", "v-half", "interleaved", "stock", "zb-v", "1f1b"), id="tied"),
        (
            4,
            "--use-distributed-optimizer --untie-embeddings-and-output-weights --num-layers 9 "
            "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4096",
            ("interleaved", "v-half", "stock"),
        ),
    ],
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


DISTRIBUTED = "--use-distributed-optimizer --micro-batch-size 1 --global-batch-size 6 --train-iters 4"
BUCKETS = "--overlap-grad-reduce --ddp-bucket-size 1"
UNTIED = "--untie-embeddings-and-output-weights"


def train_with_buckets(flags: str, as_upstream: bool = False) -> tuple[str, int]:
    """Train on this rank; returns the error message, and how much padding stands before the last bucket of any buffer.

    Args:
        as_upstream: parameters are saved from where upstream's function finds them.
    """
    mended, found = DistributedOptimizer.sharded_param_state_fully_reshardable, [0]

    def cut(self: Any, *args: Any, **options: Any) -> Any:
        found.extend(distrib_optimizer.padding_before(buffer)[-1] for buffer in self.buffers)
        return (mended.__wrapped__ if as_upstream else mended)(self, *args, **options)

    with patch.object(DistributedOptimizer, "sharded_param_state_fully_reshardable", cut):
        return train(flags), max(found)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        rest(2, f"--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --hidden-size 40 {UNTIED} {BUCKETS} --bf16"),
        rest(2, f"--pipeline-model-parallel-size 2 --pipeline-schedule stock --hidden-size 40 {UNTIED} {BUCKETS}"),
    ],
    ids=["v-untied-buckets-bf16", "stock-untied-buckets"],
)
def test_sizes_at_which_buckets_end_in_padding(pool: Pool, data: str, tmp_path: Path, ranks: int, flags: str) -> None:
    """Resumed training is the uninterrupted one's."""
    flags = f"{data} {DISTRIBUTED} {flags}"
    saving = f"{flags} --save {tmp_path}/saved --save-interval 2 --metrics {tmp_path}/whole.jsonl"
    whole = pool.run(ranks, train_with_buckets, saving)
    assert [error for error, _ in whole] == [""] * ranks
    assert max(padding for _, padding in whole) > 0
    (tmp_path / "saved" / TRACKER).write_text("2")
    assert pool.run(ranks, train, f"{flags} --load {tmp_path}/saved --metrics {tmp_path}/resumed.jsonl") == [""] * ranks
    assert metrics(tmp_path / "resumed.jsonl") == metrics(tmp_path / "whole.jsonl")[2:]


def test_what_upstream_saves_wrong_is_refused(pool: Pool, data: str, tmp_path: Path) -> None:
    flags = f"{data} {DISTRIBUTED} {BUCKETS} --num-layers 2"
    saved = pool.run(3, train_with_buckets, f"{flags} --exit-interval 2 --save {tmp_path}/saved", as_upstream=True)
    assert [error for error, _ in saved] == [""] * 3
    for error in pool.run(3, train, f"{flags} --load {tmp_path}/saved"):
        assert "optimizer state is not that of its weights" in error and "give --no-load-optim" in error
    assert pool.run(3, train, f"{flags} --load {tmp_path}/saved --no-load-optim") == [""] * 3


def test_every_replica_has_the_float32_weights_of_a_checkpoint_in_bf16(pool: Pool, data: str, tmp_path: Path) -> None:
    """The distributed optimizer loads exact weights for its own shard alone; the model's are rounded."""
    flags = f"{data} {DISTRIBUTED} --attention-dropout 0 --hidden-dropout 0"
    assert pool.run(2, train, f"{flags} --bf16 --exit-interval 2 --save {tmp_path}/saved") == [""] * 2
    for ranks in (1, 2):
        loading = f"{flags} --exit-interval 3 --load {tmp_path}/saved --metrics {tmp_path}/{ranks}.jsonl"
        assert pool.run(ranks, train, loading) == [""] * ranks
    [(_, one, _)], [(_, two, _)] = (metrics(tmp_path / f"{ranks}.jsonl") for ranks in (1, 2))
    assert two == pytest.approx(one, rel=1e-6)


def train_where_the_tracker_moves(flags: str) -> str:
    """Train on this rank, which finds another checkpoint than rank 0 does."""
    real = checkpoint.find

    def find(directory: str) -> Path | None:
        return real(directory) if torch.distributed.get_rank() == 0 else Path(directory) / "iter_0000001"

    with patch.object(checkpoint, "find", find):
        return train(flags)


def test_all_ranks_load_the_checkpoint_that_one_has_found(pool: Pool, data: str, tmp_path: Path) -> None:
    """Another training may save there meanwhile: two ranks once went on from two iterations."""
    flags = f"{data} {FLAGS} --num-layers 2 --train-iters 3"
    saving = f"{flags} --save {tmp_path}/saved --save-interval 1 --metrics {tmp_path}/whole.jsonl"
    assert pool.run(2, train, saving) == [""] * 2
    (tmp_path / "saved" / TRACKER).write_text("2")
    loading = f"{flags} --load {tmp_path}/saved --metrics {tmp_path}/resumed.jsonl"
    assert pool.run(2, train_where_the_tracker_moves, loading) == [""] * 2
    assert metrics(tmp_path / "resumed.jsonl") == metrics(tmp_path / "whole.jsonl")[2:]


@pytest.mark.parametrize(("optimizer", "saved", "loaded"), [("", 1, 2), rest("--use-distributed-optimizer", 2, 1)])
def test_experts_with_and_without_an_optimizer_of_their_own(
    pool: Pool, data: str, tmp_path: Path, optimizer: str, saved: int, loaded: int
) -> None:
    flags = (
        f"{data} {optimizer} --num-experts 4 --num-layers 4 --disable-bias-linear --pipeline-model-parallel-size 2 "
        f"--expert-model-parallel-size"
    )
    assert pool.run(4, train, f"{flags} {saved} --exit-interval 1 --save {tmp_path}") == [""] * 4
    for error in pool.run(4, train, f"{flags} {loaded} --exit-interval 2 --load {tmp_path}"):
        assert error.startswith(
            f"the checkpoint {tmp_path}/iter_0000001 is of another optimizer: an own optimizer for experts "
            f"(--expert-model-parallel-size above 1) {saved > 1} there and {loaded > 1} here; give its values, or leave the "
            "optimizer's state out with --no-load-optim"
        )
    assert pool.run(4, train, f"{flags} {loaded} --exit-interval 2 --load {tmp_path} --no-load-optim") == [""] * 4


def overwrite(file: Path, start: int, count: int = 4096) -> None:
    with file.open("r+b") as there:
        there.seek(start)
        there.write(bytes(255 - byte for byte in file.read_bytes()[start : start + count]))


def test_a_file_that_the_disk_has_changed_is_named_with_an_earlier_checkpoint(pool: Pool, data: str, tmp_path: Path) -> None:
    """Also where only numbers are: torch would load others."""
    flags = f"{data} {FLAGS} --num-layers 2 --pipeline-schedule 1f1b --hidden-size 64"
    assert pool.run(2, train, f"{flags} --save {tmp_path} --save-interval 1 --exit-interval 2") == [""] * 2
    path = tmp_path / "iter_0000002"
    file = max(path.glob("__1_*.distcp"), key=lambda one: one.stat().st_size)
    for where in (0, 0.5, 1):
        overwrite(file, start := int(where * (file.stat().st_size - 4096)))
        for error in pool.run(2, train, f"{flags} --load {tmp_path} --exit-interval 3"):
            assert error.startswith(f"the checkpoint {path} is damaged: {file.name} is not as it was written, between bytes ")
            assert error.endswith(f"; to go on from iteration 1, write 1 into {tmp_path / TRACKER}") and "\n" not in error
        overwrite(file, start)  # as it was
    overwrite(file, 0)
    (tmp_path / TRACKER).write_text("1")
    assert pool.run(2, train, f"{flags} --load {tmp_path} --exit-interval 2") == [""] * 2
