"""What tests/session/test_fine_tuning.py runs on the pool: loops in which adapters, or some layers alone, train."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple

import torch
from example_runs import example
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings
from megatron.core.transformer import TransformerConfig

from megatron.pipeline import install
from megatron.pipeline.model.layer_spec import block_spec
from megatron.pipeline.planner.planning.request import Request

STEPS = (4, 8, 4)  # microbatches


class Tuning(NamedTuple):
    """What trains, and how.

    Attributes:
        pipeline: ranks of the 4; the others are tensor-parallel, or replicas with a distributed optimizer and both overlaps.
        tensor: ranks, with sequence parallelism.
        adapters: beside all linears of these layers, else the layers themselves train.
        layers: numbers of those with anything that trains.
        tied: the ends are, and are frozen.
        recomputes: settings of recomputation.
        alone: numbers of the layers that train in the first iteration; the others join behind it.
        hooked: the embedding's output needs a gradient, by a hook as peft's.
    """

    pipeline: int = 4
    tensor: int = 1
    adapters: bool = True
    layers: tuple[int, ...] = tuple(range(1, 9))
    tied: bool = False
    recomputes: tuple[tuple[str, Any], ...] = ()
    alone: tuple[int, ...] = ()
    hooked: bool = False


class Tuned(NamedTuple):
    """Of a rank: losses by iteration and microbatch, norms, trained weights by name, and which of them have not moved."""

    losses: list[list[float]]
    norms: list[float]
    weights: dict[str, list[float]]
    still: list[str]


class Beside(torch.nn.Module):
    """A frozen linear, and beside it torch's own ones as adapters have them: where a tensor-parallel linear has a part of its
    outputs or inputs, the factor on that side has, too, and the other is on all ranks alike and sees a part of the sequence."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.linear, self.of_columns = linear.requires_grad_(False), isinstance(linear, ColumnParallelLinear)
        self.down = torch.nn.Linear(inputs, 4, bias=False)
        self.up = torch.nn.Linear(4, outputs, bias=False)
        self.shares = linear.config.sequence_parallel
        (self.down if self.of_columns else self.up).weight.sequence_parallel = self.shares  # type: ignore[attr-defined]
        (self.up if self.of_columns else self.down).weight.tensor_model_parallel = self.shares  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.linear(hidden)
        narrow = self.down(hidden)
        if self.shares and self.of_columns:
            narrow = mappings.gather_from_sequence_parallel_region(narrow)
        elif self.shares:
            narrow = mappings.reduce_scatter_to_sequence_parallel_region(narrow)
        return output + self.up(narrow), bias


def train(schedule: str, tuning: Tuning, chunks: int | None = None) -> Tuned:
    """Steps on 4 ranks. A V has 2 chunks on each; so has stock, and any other, if it is given."""
    own = example("own_training_loop")
    install(Request(schedule, 1, 1, chunks=chunks) if schedule == "interleaved" else schedule)
    chunks = 2 if schedule == "zb-v" else chunks
    parallel_state.initialize_model_parallel(tuning.tensor, tuning.pipeline, chunks)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    models = _build(tuning, chunks)
    replicas = parallel_state.get_data_parallel_world_size() > 1
    shared = {"use_distributed_optimizer": replicas, "overlap_param_gather": replicas}
    given, config = DistributedDataParallelConfig(overlap_grad_reduce=replicas, bucket_size=2000, **shared), models[0].config
    wrapped = [DistributedDataParallel(config, given, model) for model in models]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, **shared), wrapped)
    if replicas:
        for setting, name in (("no_sync", "no_sync"), ("grad_sync", "start_grad_sync"), ("param_sync", "start_param_sync")):
            each = [getattr(chunk, name) for chunk in wrapped]
            setattr(config, f"{setting}_func", each if len(each) > 1 else each[0])
    before, losses, norms = _trained(models), [], []
    for seed, microbatches in enumerate(STEPS):
        for layer in (layer for model in models if tuning.alone for layer in model.decoder.layers):
            layer.requires_grad_(layer.layer_number in (tuning.layers if seed else tuning.alone))
        data = own.batches(microbatches, seed + 10 * parallel_state.get_data_parallel_rank())
        found, norm = own.run(wrapped, data, optimizer)
        losses.append([float(one.mean()) for one in found] if parallel_state.is_pipeline_last_stage() else [])
        norms.append(float(norm))
    for chunk in wrapped if replicas else ():
        chunk.start_param_sync(force_sync=True)
    after = _trained(models)
    return Tuned(losses, norms, after, [name for name, weight in after.items() if weight == before[name]])


def _build(tuning: Tuning, chunks: int | None) -> list[Any]:
    config = TransformerConfig(
        num_layers=8,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tuning.tensor,
        sequence_parallel=tuning.tensor > 1,
        pipeline_model_parallel_size=tuning.pipeline,
        virtual_pipeline_model_parallel_size=chunks,
        overlap_p2p_comm=chunks is not None,
        batch_p2p_comm=chunks is None,
        pipeline_dtype=torch.float32,
        **dict(tuning.recomputes),
    )
    models, settings = [], Namespace(transformer_impl="local", seed=7)
    for vp_stage in range(chunks) if chunks else [None]:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        ends = {"pre_process": first, "post_process": last, "vp_stage": vp_stage}
        layers = block_spec(settings, config, vp_stage)
        models.append(GPTModel(config, layers, 64, 16, share_embeddings_and_output_weights=tuning.tied, **ends))
        models[-1].requires_grad_(False)
        if tuning.hooked and first:
            models[-1].embedding.register_forward_hook(lambda *given: given[-1].requires_grad_(True))
        for layer in models[-1].decoder.layers:
            if layer.layer_number in tuning.layers:
                _adapt(layer) if tuning.adapters else layer.requires_grad_(True)
        for end in (models[-1],) if tuning.tied and (first or last) else ():
            end.shared_embedding_or_output_weight().data.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    tied = [(model, model.shared_embedding_or_output_weight().clone()) for model in models if tuning.tied and _has_end(model)]
    drawn: list[Any] = example("random_tokens").draw(models)
    for model, weight in tied:
        model.shared_embedding_or_output_weight().data.copy_(weight)
    return drawn


def _has_end(model: Any) -> bool:
    return bool(model.pre_process or model.post_process)


def _adapt(layer: torch.nn.Module) -> None:
    for module in list(layer.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
                setattr(module, name, Beside(child))


def _trained(models: list[Any]) -> dict[str, list[float]]:
    return {
        f"{layer.layer_number}.{name}": weight.flatten().tolist()
        for model in models
        for layer in model.decoder.layers
        for name, weight in layer.named_parameters()
        if weight.requires_grad
    }
