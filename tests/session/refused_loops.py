"""What tests/session/test_own_loop.py runs on the pool: loops that are refused, or warned."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from example_runs import example, optimizer_of
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.transformer import TransformerConfig
from megatron.pipeline.patches import loops
from session.own_loops import _iterate, one_chunk, refused
from torch.distributed.checkpoint.api import _wrap_exception

from megatron.pipeline import install
from megatron.pipeline.planner.planning import Request
from megatron.pipeline.runtime.pipeline import Pipeline


def warned(gathered: bool) -> tuple[list[float], list[str]]:
    """Losses of one token on 2 tensor-parallel ranks, without and twice with label smoothing; what is logged."""
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    install("zb-h1")
    parallel_state.initialize_model_parallel(2)
    logger = logging.getLogger("megatron.pipeline.session.own_loop")
    logger.addHandler(handler)
    try:
        logits = torch.arange(8.0).reshape(1, 1, 8)
        part = logits if gathered else logits.chunk(2, -1)[torch.distributed.get_rank()]
        compute, target = tensor_parallel.vocab_parallel_cross_entropy, torch.tensor([[1]])
        losses = [
            float(compute(vocab_parallel_logits=part.clone(), target=target)),
            float(compute(part.clone(), target, 0.1)),
            float(compute(part.clone(), target, label_smoothing=0.1)),
        ]
    finally:
        logger.removeHandler(handler)
    return losses, said


def built_before() -> str:
    """What a loop is told whose chunk was wrapped before the schedule was installed."""
    own = example("own_training_loop")
    install("stock")
    parallel_state.initialize_model_parallel(1, 2)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    model = one_chunk("")
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    install("zb-h1")
    return refused(lambda: _iterate(chunk, 2, own.batches(2, seed=0)))


def taken_over() -> tuple[str, str]:
    """The module of the function that runs an iteration, and what prepares chunks, once another pipeline has been installed."""
    install("zb-h1")
    Pipeline(Request("stock", 4, 4)).install()
    assert schedules.get_forward_backward_func is get_forward_backward_func
    return schedules.forward_backward_no_pipelining.__module__, str(loops.current)


def chunks_planned(schedule: str, given: int) -> int:
    """How many chunks per rank a schedule has once a configuration has said its own number."""
    loop = install(schedule)
    TransformerConfig(
        num_layers=16,
        hidden_size=32,
        num_attention_heads=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=given,
        pipeline_dtype=torch.float32,
    )
    return loop.pipeline(2).placement.chunks


def early_prediction(schedule: str) -> str:
    """The refusal of a layer for a further token on a stage before the last."""
    install(schedule)
    layout = {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Ett|tt|tm|L", "pipeline_dtype": torch.float32}
    sizes = {"num_layers": 5, "hidden_size": 32, "num_attention_heads": 4, "mtp_num_layers": 1}
    return refused(lambda: TransformerConfig(**sizes, **layout))


def with_chunks(schedule: str, chunks: int | None) -> str:
    """The refusal of a model that has other chunks per rank than the schedule."""
    own = example("own_training_loop")
    install(schedule)
    parallel_state.initialize_model_parallel(1, torch.distributed.get_world_size(), chunks)
    models = own.wrap(own.build(share_embeddings_and_output_weights=True))
    return refused(lambda: own.run(models, own.batches(4, seed=0), optimizer_of(models)))


def built_too_early(schedule: str, installed: str = "stock") -> str:
    """What a loop is told whose chunks have been built, and not yet wrapped, when the schedule is installed."""
    own = example("own_training_loop")
    install(installed)
    parallel_state.initialize_model_parallel(1, torch.distributed.get_world_size(), 2)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    built = own.build()
    install(schedule)
    chunks = own.wrap(built)
    return refused(lambda: own.run(chunks, own.batches(4, seed=0), optimizer_of(chunks)))


def checkpoints(folder: str) -> list[str]:
    """What a loop under ``install`` meets at checkpoints: the second finds a full disk, the third is whole, the first damaged."""
    install("zb-h1")
    own, root = example("own_training_loop"), Path(folder)
    parallel_state.initialize_model_parallel(1, 2)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    [chunk] = own.wrap(own.build())
    first, second, third = (root / f"iter_000000{number}" for number in (1, 2, 3))
    if torch.distributed.get_rank() == 0:
        for path in (first, second, third):
            path.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(chunk.sharded_state_dict(), str(first))
    prepare = FileSystemWriterAsync.prepare_write_data

    def full(writer: Any, *rest: Any) -> None:
        prepare(writer, *rest)
        failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        writer.retrieve_write_results = lambda: _wrap_exception(failure)

    said = []
    with patch.object(FileSystemWriterAsync, "prepare_write_data", full):
        said.append(refused(lambda: dist_checkpointing.save(chunk.sharded_state_dict(), str(second))))
    dist_checkpointing.save(chunk.sharded_state_dict(prefix="again."), str(third))
    dist_checkpointing.load(chunk.sharded_state_dict(prefix="again."), str(third))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        next(first.glob("*.distcp")).unlink()
    torch.distributed.barrier()
    said.append(refused(lambda: dist_checkpointing.load(chunk.sharded_state_dict(), str(first))))
    return [*said, *sorted(path.name for path in root.iterdir())]
