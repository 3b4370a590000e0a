"""A training loop on megatron-core alone, under a schedule of this package, or under megatron-core's own (stock).

torchrun --nproc-per-node 2 examples/own_training_loop.py zb-v
"""

import sys
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from random_tokens import BATCH, CUDA, LENGTH, VOCABULARY, batches, draw, start

from megatron.pipeline import install
from megatron.pipeline.runtime.pipeline import Pipeline


def plan(schedule: str, **options: Any) -> Pipeline:
    """The pipeline, in megatron-core's place, and the process groups of its placement."""
    loop = install(schedule, **options)  # all that it takes
    pipeline = loop.pipeline(torch.distributed.get_world_size())
    chunks = pipeline.placement.chunks
    parallel_state.initialize_model_parallel(1, pipeline.placement.ranks, chunks if chunks > 1 else None)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    return pipeline


def build(**options: Any) -> list[GPTModel]:
    """This rank's chunks of a small GPT, made as under megatron-core's own schedules: a V's are where the schedule wants them."""
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=8,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not CUDA,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
    )
    models = []
    for vp_stage in range(chunks) if chunks else [None]:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        ends = {"pre_process": first, "post_process": last, "vp_stage": vp_stage}
        models.append(GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, **ends, **options))
    return draw(models)


def wrap(models: list[GPTModel], **options: Any) -> list[DistributedDataParallel]:
    """The chunks in DDP."""
    models[0].config.finalize_model_grads_func = finalize_model_grads
    return [DistributedDataParallel(model.config, DistributedDataParallelConfig(**options), model) for model in models]


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """megatron-core's protocol: the losses by token [b, s], and a function that returns what to minimise and what to report."""
    tokens = next(data).to(next(model.parameters()).device)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
    positions = torch.arange(LENGTH, device=tokens.device).expand(BATCH, LENGTH)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), lambda losses: (losses.mean(), losses.detach())


def run(chunks: list[Any], data: list[torch.Tensor], optimizer: Any = None) -> tuple[list[torch.Tensor], float]:
    """An iteration on microbatches [b, s + 1], each one's losses by token, and the gradients' norm; or only forwards."""
    if optimizer:
        optimizer.zero_grad()
        for chunk in chunks:
            chunk.zero_grad_buffer()
    sizes = {"num_microbatches": len(data), "seq_length": LENGTH, "micro_batch_size": BATCH, "forward_only": not optimizer}
    iterators = [iter(data) for _ in chunks]
    losses = get_forward_backward_func()(forward_step_func=forward_step, data_iterator=iterators, model=chunks, **sizes)
    return losses, optimizer.step()[1] if optimizer else 0.0


if __name__ == "__main__":
    start()
    plan(sys.argv[1])
    chunks = wrap(build())
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), chunks)
    for iteration in range(5):
        losses, norm = run(chunks, batches(4, seed=iteration % 2), optimizer)
        if parallel_state.is_pipeline_last_stage():
            print(f"loss {torch.stack(losses).mean():.4f}, gradient norm {norm:.4f}")
