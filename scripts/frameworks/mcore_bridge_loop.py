"""mcore-bridge's model and the calls of ms-swift's trainer under a schedule: a tiny Llama of transformers, on 4 ranks.

``mcore_bridge_loop.py ENGINE SCHEDULE,PIPELINE_RANKS, ..``. mcore-bridge reads the configuration, builds the chunks and loads the
weights of transformers; exported before the first step, they must be what the checkpoint has. Losses are sums over tokens, whose
numbers megatron-core divides by; sequences of a step have its length. An evaluation runs behind the first step.
"""

from __future__ import annotations

import tempfile
from typing import Any

import borders
import torch

VOCABULARY, BATCH = 128, 2
STEPS = ((4, 32), (8, 24), (3, 40), (5, 32))  # microbatches, and the length of their sequences
ON_A_V = ("zb-v", "v-half")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}


def build(schedule: str, ranks: int) -> tuple[Any, list[Any], Any]:
    """The loop that is installed, the chunks in DDP, and their optimizer."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from transformers import LlamaConfig, LlamaForCausalLM

    from megatron.pipeline import install

    borders.see_the_cpu("mcore_bridge")
    loop = install(schedule)
    chunks = 2 if schedule in ON_A_V else None
    parallel_state.initialize_model_parallel(1, ranks, chunks)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    torch.manual_seed(11)
    llama = LlamaConfig(**SIZES, vocab_size=VOCABULARY, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    theirs, folder = LlamaForCausalLM(llama), tempfile.mkdtemp()
    theirs.save_pretrained(folder)
    fusions = ("masked_softmax", "bias_activation", "bias_dropout", "apply_rope")  # of Transformer Engine and apex
    config = ModelConfig(
        **hf_to_mcore_config(llama),
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        overlap_p2p_comm=chunks is not None,
        batch_p2p_comm=chunks is None,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        **{f"{fusion}_fusion": False for fusion in fusions},
    )
    models = get_mcore_model(config)
    bridge = config.bridge
    bridge.load_weights(models, folder)
    exported = dict(bridge.export_weights(models))
    differ = [name for name, weight in theirs.state_dict().items() if not torch.equal(exported.get(name, weight[:0]), weight)]
    if differ:
        raise ValueError(f"Error: {len(differ)} weights have not come back equal, {differ[:3]} among them")
    overlap = ranks < torch.distributed.get_world_size()
    shared = {"use_distributed_optimizer": True, "overlap_param_gather": overlap}
    settings = {"overlap_grad_reduce": overlap, "align_param_gather": overlap, "check_for_nan_in_grad": True, **shared}
    # Each with a configuration of its own, and all but the first without buckets, as ms-swift wraps them.
    wrapped = [
        DistributedDataParallel(config, DistributedDataParallelConfig(**settings), model, disable_bucketing=place > 0)
        for place, model in enumerate(models)
    ]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, **shared), wrapped)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    if overlap:
        config.no_sync_func = [chunk.no_sync for chunk in wrapped]
        config.param_sync_func = [chunk.start_param_sync for chunk in wrapped]
        for name in () if chunks else ("no_sync_func", "param_sync_func"):
            setattr(config, name, getattr(config, name)[0])
    return loop, wrapped, optimizer


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    from megatron.core import mpu
    from megatron.core.utils import get_attr_wrapped_model

    tokens, stage = next(data), get_attr_wrapped_model(model, "vp_stage")
    last = mpu.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage)
    labels = tokens.roll(-1, 1) if last else None
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        both = torch.stack([losses.float().sum(), torch.tensor(float(losses.numel()))])
        return both[0].clone(), both[1].detach().clone().to(torch.int), {"loss": both.detach().clone()}

    return model(input_ids=tokens, position_ids=positions, attention_mask=None, labels=labels), loss


def main(row: borders.Row) -> None:
    """Train, and have the last rank of the first replica print the loss and the norm of every step."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    loop, model, optimizer = build(row.schedule, row.ranks)

    def call(seed: int, microbatches: int, length: int, forward_only: bool = False) -> list[Any]:
        generator = torch.Generator().manual_seed(10 * parallel_state.get_data_parallel_rank() + seed)
        drawn = torch.randint(VOCABULARY, (microbatches, BATCH, length), generator=generator)
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(drawn) for _ in model] if len(model) > 1 else iter(drawn),
            model=model,
            num_microbatches=microbatches,
            seq_length=length,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        return [report["loss"].tolist() for report in found]

    found = []
    for step, (microbatches, length) in enumerate(STEPS):
        for chunk in model:
            chunk.train()
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = call(step, microbatches, length)
        _, norm, _ = optimizer.step()
        if step == 0:
            for chunk in model:
                chunk.eval()
            with torch.no_grad():
                reports += call(9, 6, length, forward_only=True)
        found.append((reports, float(norm)))
    borders.report(loop, STEPS[-1][0], ", ".join(f"{count} x {length}" for count, length in STEPS), found)


if __name__ == "__main__":
    borders.train(borders.start(__doc__, "cryptography"), main)
