"""What tests/session/test_fine_tuning.py runs on the pool: a loop that gives packed sequences, as in frameworks."""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import patch

import torch
from example_runs import example, optimizer_of
from megatron.core import parallel_state, tensor_parallel, utils
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.pipeline import install


def train(schedule: str, apart: bool = True) -> tuple[list[list[float]], list[float]]:
    """Losses by microbatch, on the last rank, and norms, of steps on 4 ranks.

    Args:
        apart: three sequences are in each row; else one.
    """
    own, chunks = example("own_training_loop"), 2 if schedule == "zb-v" else None
    install(schedule)
    parallel_state.initialize_model_parallel(1, 4, chunks)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    # The module puts its attention into megatron-core's own local layers.
    with patch.object(gpt_layer_specs.LocalSpecProvider, "core_attention"), patch.object(utils, "tex", None, create=True):
        layers = importlib.reload(importlib.import_module("packed_layers")).LAYERS
    with (
        patch.object(own, "get_gpt_layer_local_spec", lambda: layers),
        patch.object(own, "forward_step", lambda data, model: _step(next(data), model, apart)),
        patch.object(own, "BATCH", 1),
    ):
        wrapped = own.wrap(own.build())
        optimizer, losses, norms = optimizer_of(wrapped), [], []
        for seed, microbatches in enumerate((4, 6, 4)):
            found, norm = own.run(wrapped, own.batches(microbatches, seed), optimizer)
            losses.append([float(one) for one in found] if parallel_state.is_pipeline_last_stage() else [])
            norms.append(float(norm))
    return losses, norms


def _step(batch: torch.Tensor, model: Any, apart: bool) -> tuple[torch.Tensor, Any]:
    row = batch[:1]
    cut, length = 1 + int(row[0, 0]) % 5, row.shape[1] - 1
    lengths = [cut, 2 * cut, length - 3 * cut] if apart else [length]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    output = model(row[:, :-1], positions, None, labels=row[:, 1:], packed_seq_params=packed)
    return output, lambda losses: (losses.mean(), losses.detach().mean())
