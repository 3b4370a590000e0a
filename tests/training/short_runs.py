"""Short trainings for the tests: what runs on a rank of the pool, through the same steps as ``pretrain_gpt.py``."""

from __future__ import annotations

import json
import logging
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.datasets.utils import Split
from megatron.pipeline.patches import schedules
from torch.distributed.checkpoint import api
from torch.distributed.checkpoint.api import CheckpointException

from megatron.pipeline.trainer import checkpoint, iterations, loop, program
from megatron.pipeline.trainer.data import Samples, get_batch
from megatron.pipeline.trainer.state import build_training

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --lr 1e-2 "
    "--lr-warmup-iters 2 --tokenizer-type ByteLevelTokenizer --split 80,20,0 --num-workers 0 --train-iters 6 "
    "--log-interval 2 --attention-dropout 0.1 --hidden-dropout 0.1 --global-batch-size 8 --eval-iters 0"
)


def train(flags: str, terminate_at: int | None = None, fail_while_saving: bool = False, freezes: bool = False) -> str:
    """Train on this rank of the pool; returns the error message if there was one.

    Args:
        terminate_at: the last rank gets a SIGTERM before this iteration.
        fail_while_saving: the disk is full when the checkpoint's tensors have been written.
        freezes: the loop freezes what exists and in the end unfreezes all, also what the pool has frozen to have quick runs.
    """
    MockGPTLowLevelDataset.size = 200  # documents of some thousand tokens; upstream shuffles the samples of 100,000 for seconds
    schedules.restore()
    real_run, real_save = iterations.Iterations.run, checkpoint.dist_checkpointing.save

    def run(self: Any, follows: bool) -> Any:
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if last and self._training.iteration + 1 == terminate_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return real_run(self, follows)

    def save(*args: Any, **more: Any) -> None:
        real_save(*args, **more)
        # What the writer makes of it; not an Exception.
        raise CheckpointException("write", {0: api._wrap_exception(OSError(28, "No space left on device"))})

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(iterations.Iterations, "run", run)
        if not freezes:
            changed.setattr(loop, "_quick_garbage_collection", nullcontext)
        if fail_while_saving:
            changed.setattr(checkpoint.dist_checkpointing, "save", save)
        try:
            args, tokenizer, pipeline = program.prepare(f"{MODEL} {flags}".split(), torch.distributed.get_world_size())
            program.run(args, tokenizer, pipeline, guard=lambda *_, **__: nullcontext())
        except (ValueError, RuntimeError) as error:
            program.destroy_num_microbatches_calculator()
            return str(error)
    return ""


def batches(flags: str, count: int) -> tuple[tuple[int, int, int], list[list[int]]]:
    """This rank's (tensor, pipeline, data) coordinates, and the tokens of its next microbatches (empty without data)."""
    args, tokenizer, pipeline = program.prepare(f"{MODEL} {flags}".split(), torch.distributed.get_world_size())
    with program._megatron_state(args, pipeline.placement):
        with Samples(args, tokenizer, build_training(args, pipeline.placement).chunks).microbatches(Split.train, 0) as data:
            assert data is not None
            found = [get_batch(data[0]) for _ in range(count)]
        where = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
    return where, [batch["tokens"].flatten().tolist() if batch else [] for batch in found]


def warned(flags: str) -> list[str]:
    """What upstream's datasets warn of on this rank while ``batches`` reads one."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    upstream, keep = logging.getLogger("megatron.core.datasets"), Keep(logging.WARNING)
    upstream.addHandler(keep)
    try:
        batches(flags, 1)
    finally:
        upstream.removeHandler(keep)
    return found


def ran(errors: list[str]) -> bool:
    assert not any(errors), errors
    return True


def metrics(path: Path) -> list[tuple[int, float, float]]:
    """Iteration, loss and gradient norm of every iteration, exactly."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(record["iteration"], record["loss"], record["grad_norm"]) for record in records]
