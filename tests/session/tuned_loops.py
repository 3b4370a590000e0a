"""What tests/session/test_fine_tuning.py runs on the pool: loops in which adapters, or some layers alone, train."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from example_runs import example
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, mappings
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.utils import sharded_state_dict_default
from torch.nn.utils import parametrize

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
        split: the adapters are megatron-core's linears, whose gradients W computes, without tensor parallelism.
        experts: in the place of each MLP there are 4, two on each of 2 ranks: "apart", or "grouped" and all in bfloat16.
        layers: numbers of those with anything that trains.
        tied: the ends are, and are frozen.
        recomputes: settings of recomputation.
        alone: numbers of the layers that train in the first iteration; the others join behind it.
        hooked: the embedding's output needs a gradient, by a hook as peft's.
    """

    pipeline: int = 4
    tensor: int = 1
    adapters: bool = True
    split: bool = False
    experts: str = ""
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

    def __init__(self, linear: Any, split: bool) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.linear, self.of_columns = linear.requires_grad_(False), isinstance(linear, ColumnParallelLinear)
        given = (
            {"config": linear.config, "init_method": linear.config.init_method, "is_expert": linear.is_expert} if split else {}
        )
        kind: Any = ColumnParallelLinear if split else torch.nn.Linear
        self.down, self.up = kind(inputs, 4, bias=False, **given), kind(4, outputs, bias=False, **given)
        self.shares = linear.config.sequence_parallel and not linear.is_expert
        for weight in (self.down.weight, self.up.weight):
            weight.allreduce = getattr(linear.weight, "allreduce", True)  # False of experts, which not all replicas have
        (self.down if self.of_columns else self.up).weight.sequence_parallel = self.shares  # type: ignore[attr-defined]
        (self.up if self.of_columns else self.down).weight.tensor_model_parallel = self.shares  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.linear(hidden)
        narrow = _output(self.down, hidden)
        if self.shares and self.of_columns:
            narrow = mappings.gather_from_sequence_parallel_region(narrow)
        elif self.shares:
            narrow = mappings.reduce_scatter_to_sequence_parallel_region(narrow)
        return output + _output(self.up, narrow), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, module in self.named_children():
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return found


def _output(linear: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    output = linear(hidden)
    return output[0] if isinstance(output, tuple) else output  # megatron-core's return a bias beside it


class Within(torch.nn.Module):
    """Adapters of a weight that is no linear's, as peft's of "target_parameters": a product for each of the grouped experts."""

    def __init__(self, weight: torch.nn.Parameter, shape: tuple[int, int, int]) -> None:
        super().__init__()
        experts, inputs, outputs = shape
        self.down = torch.nn.Parameter(torch.ones(experts, inputs, 4, dtype=weight.dtype))
        self.up = torch.nn.Parameter(torch.ones(experts, 4, outputs, dtype=weight.dtype))
        for each in (self.down, self.up):
            each.allreduce = weight.allreduce  # type: ignore[attr-defined]

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.down @ self.up).view_as(weight)


class Loop(NamedTuple):
    """A rank's part of a loop: its chunks without and with DDP, and what updates them."""

    models: list[Any]
    wrapped: list[Any]
    optimizer: Any

    def step(self, microbatches: int, seed: int) -> tuple[list[float], float]:
        """Losses by microbatch, on the last rank, and the norm."""
        own = example("own_training_loop")
        data = own.batches(microbatches, seed + 10 * parallel_state.get_data_parallel_rank())
        found, norm = own.run(self.wrapped, data, self.optimizer)
        return [float(one.mean()) for one in found] if parallel_state.is_pipeline_last_stage() else [], float(norm)


def train(schedule: str, tuning: Tuning, chunks: int | None = None) -> Tuned:
    """Steps on 4 ranks. A V has 2 chunks on each; so has stock, and any other, if it is given."""
    models, wrapped, _ = loop = started(schedule, tuning, chunks)
    before, losses, norms = _trained(models), [], []
    for seed, microbatches in enumerate(STEPS):
        for layer in (layer for model in models if tuning.alone for layer in model.decoder.layers):
            layer.requires_grad_(layer.layer_number in (tuning.layers if seed else tuning.alone))
        found, norm = loop.step(microbatches, seed)
        losses.append(found)
        norms.append(norm)
    for chunk in wrapped if wrapped[0].ddp_config.overlap_param_gather else ():
        chunk.start_param_sync(force_sync=True)
    after = _trained(models)
    return Tuned(losses, norms, after, [name for name, weight in after.items() if weight == before[name]])


def gathered(schedule: str, tuning: Tuning) -> int:
    """How many times the second iteration of a model gathers objects."""
    loop = started(schedule, tuning)
    loop.step(4, 0)
    with patch.object(torch.distributed, "all_gather_object", wraps=torch.distributed.all_gather_object) as called:
        loop.step(4, 1)
    return called.call_count


def started(schedule: str, tuning: Tuning, chunks: int | None = None) -> Loop:
    install(Request(schedule, 1, 1, chunks=chunks) if schedule == "interleaved" else schedule)
    chunks = 2 if schedule == "zb-v" else chunks
    shared = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1} if tuning.experts else {}
    parallel_state.initialize_model_parallel(tuning.tensor, tuning.pipeline, chunks, **shared)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    models = _build(tuning, chunks, shared)
    replicas = parallel_state.get_data_parallel_world_size() > 1
    config, half = models[0].config, models[0].config.bf16
    shared = {"use_distributed_optimizer": replicas, "overlap_param_gather": replicas}
    given = DistributedDataParallelConfig(overlap_grad_reduce=replicas, bucket_size=2000, grad_reduce_in_fp32=half, **shared)
    wrapped = [DistributedDataParallel(config, given, Float16Module(config, model) if half else model) for model in models]
    config.finalize_model_grads_func = finalize_model_grads
    dtype = {"bf16": True, "params_dtype": torch.bfloat16} if half else {}
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, **shared, **dtype), wrapped)
    if replicas:
        for setting, name in (("no_sync", "no_sync"), ("grad_sync", "start_grad_sync"), ("param_sync", "start_param_sync")):
            each = [getattr(chunk, name) for chunk in wrapped]
            setattr(config, f"{setting}_func", each if len(each) > 1 else each[0])
    return Loop(models, wrapped, optimizer)


def _build(tuning: Tuning, chunks: int | None, shared: dict[str, int]) -> list[Any]:
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
    half = {"bf16": True, "params_dtype": torch.bfloat16, "moe_grouped_gemm": True} if tuning.experts == "grouped" else {}
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
        pipeline_dtype=half.get("params_dtype", torch.float32),
        **dict(tuning.recomputes),
        **(experts | shared | half if tuning.experts else {}),
    )
    models = [_chunk(tuning, config, vp_stage) for vp_stage in (range(chunks) if chunks else [None])]
    tied = [(model, model.shared_embedding_or_output_weight().clone()) for model in models if tuning.tied and _has_end(model)]
    drawn: list[Any] = example("random_tokens").draw(models)
    for model, weight in tied:
        model.shared_embedding_or_output_weight().data.copy_(weight)
    for weight in (weight for model in models for weight in model.parameters() if not getattr(weight, "allreduce", True)):
        weight.data.mul_(1.0 + parallel_state.get_expert_model_parallel_rank())  # the other ranks' experts are others
    return drawn


def _chunk(tuning: Tuning, config: TransformerConfig, vp_stage: int | None) -> Any:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    ends = {"pre_process": first, "post_process": last, "vp_stage": vp_stage}
    layers = block_spec(Namespace(transformer_impl="local", seed=7), config, vp_stage)
    model = GPTModel(config, layers, 64, 16, share_embeddings_and_output_weights=tuning.tied, **ends)
    model.requires_grad_(False)
    if tuning.hooked and first:
        model.embedding.register_forward_hook(lambda *given: given[-1].requires_grad_(True))
    for layer in model.decoder.layers:
        if layer.layer_number in tuning.layers:
            _adapt(layer, tuning.split) if tuning.adapters else layer.requires_grad_(True)
    if tuning.tied and _has_end(model):
        model.shared_embedding_or_output_weight().data.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    return model


def _has_end(model: Any) -> bool:
    return bool(model.pre_process or model.post_process)


def _adapt(layer: torch.nn.Module, split: bool) -> None:
    modules: list[Any] = list(layer.modules())
    for module in modules:
        for name, child in list(module.named_children()):
            if isinstance(child, (ColumnParallelLinear, RowParallelLinear)):
                setattr(module, name, Beside(child, split))
        if type(module).__name__ == "SeededGroupedExperts":
            hidden, count = module.config.hidden_size, module.num_local_experts
            for name, shape in (("weight1", (count, hidden, -1)), ("weight2", (count, -1, hidden))):
                weight = getattr(module, name)
                parametrize.register_parametrization(module, name, Within(weight, weight.view(shape).shape))


def _trained(models: list[Any]) -> dict[str, list[float]]:
    return {
        f"{layer.layer_number}.{name}": weight.flatten().tolist()
        for model in models
        for layer in model.decoder.layers
        for name, weight in layer.named_parameters()
        if weight.requires_grad
    }
