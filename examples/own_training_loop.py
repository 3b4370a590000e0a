"""A training loop on megatron-core alone, under a schedule of this package.

torchrun --nproc-per-node 2 examples/own_training_loop.py zb-v
"""

import sys
from functools import partial

import torch

from megatron.pipeline import patches

patches.install()  # before the model is built

from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType

from megatron.pipeline.model.boundary import BoundaryModules
from megatron.pipeline.model.layout import PlacementLayout
from megatron.pipeline.model.split_linear import split_weights
from megatron.pipeline.planning import Request
from megatron.pipeline.runtime.pipeline import Pipeline

LAYERS, HIDDEN, HEADS, LENGTH, VOCABULARY, BATCH = 4, 32, 4, 16, 64, 2


def plan(schedule, microbatches=4):
    """The pipeline, and megatron-core's process groups for its placement."""
    pipeline = Pipeline(Request(schedule, torch.distributed.get_world_size(), microbatches))
    pipeline.check(microbatches)  # plans and verifies now, not in the first iteration
    chunks = pipeline.placement.chunks
    parallel_state.initialize_model_parallel(1, pipeline.placement.ranks, chunks if chunks > 1 else None)
    return pipeline


def build(pipeline, adapt=lambda model: None):
    """This rank's chunks in DDP; ``adapt`` may change a chunk before its linears are split."""
    placement, rank = pipeline.placement, parallel_state.get_pipeline_model_parallel_rank()
    stages = [[LayerType.decoder] * (LAYERS // placement.depth) for _ in range(placement.depth)]
    stages[0].insert(0, LayerType.embedding)
    stages[-1].append(LayerType.loss)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0,
        pipeline_model_parallel_size=placement.ranks, pipeline_dtype=torch.float32, gradient_accumulation_fusion=False,
        virtual_pipeline_model_parallel_size=placement.chunks if placement.chunks > 1 else None,
        pipeline_model_parallel_layout=PlacementLayout(stages, placement),
        use_cpu_initialization=not torch.cuda.is_available(),
    )  # fmt: skip
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    models = []
    for chunk, stage in enumerate(placement.stages[rank]):
        torch.manual_seed(stage)
        models.append(GPTModel(
            config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, pre_process=stage == 0,
            post_process=stage == placement.last_stage, vp_stage=chunk if placement.chunks > 1 else None,
        ))  # fmt: skip
        adapt(models[-1])
        split_weights(models[-1])  # before DDP
    boundary = BoundaryModules(placement)  # nothing else knows which ranks have the first and the last stage
    config.finalize_model_grads_func = boundary.finalize_model_grads
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, delay_wgrad_compute=True)  # DDP hears of W from the modules
    return [DistributedDataParallel(config, model, ddp) for model in models]


def batches(count, seed):
    """Random microbatches; the same on every rank, of which the first and the last stage read them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(count)]


def forward_step(data, model, reduce=lambda losses: (losses.mean(), losses.detach().mean())):
    tokens, device = next(data), next(model.parameters()).device
    positions = torch.arange(LENGTH, device=device).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    return model(tokens[:, :-1].to(device), positions, mask, labels=tokens[:, 1:].to(device)), reduce


def run(pipeline, chunks, data, forward_only=False, step=forward_step):
    """One iteration; what the loss function reports, on the rank that has the last stage."""
    return pipeline.forward_backward(
        forward_step_func=step, data_iterator=[iter(data) for _ in chunks], model=chunks, num_microbatches=len(data),
        seq_length=LENGTH, micro_batch_size=BATCH, forward_only=forward_only,
    )  # fmt: skip


def step(pipeline, chunks, optimizer, data, step=forward_step):
    """One training iteration; the losses, and the norm of the gradients."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = run(pipeline, chunks, data, step=partial(step))
    return losses, optimizer.step()[1]


def train(schedule, iterations=5):
    pipeline = plan(schedule)
    chunks = build(pipeline)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), chunks)
    return [step(pipeline, chunks, optimizer, batches(4, seed=iteration % 2)) for iteration in range(iterations)]


if __name__ == "__main__":
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    for losses, norm in train(sys.argv[1] if len(sys.argv) > 1 else "zb-h1"):
        if losses:  # on the rank that has the last stage
            print(f"loss {sum(map(float, losses)) / len(losses):.4f}, gradient norm {norm:.4f}")
