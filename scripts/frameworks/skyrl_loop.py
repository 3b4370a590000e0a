"""SkyRL's wrapper of a model under a schedule: a tiny Llama of transformers in Megatron Bridge's chunks, on 4 ranks.

``skyrl_loop.py ENGINE SCHEDULE,PIPELINE_RANKS, ..``. The wrapper computes log-probabilities, trains on them with SkyRL's own
loss in one or two calls per step, and reduces gradients once behind them; it broadcasts what the last rank reports. Its two
functions of a Megatron Bridge after 0.6.2, for adapters of experts, are absent; without adapters they do what is here in their
place.
"""

from __future__ import annotations

from typing import Any

import borders
import torch

VOCABULARY, ACTIONS = 128, 6
STEPS = (((4, 14),), ((6, 18), (2, 10)), ((3, 16),))  # of every call the microbatches, and the length of their rows
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}


def build(schedule: str, ranks: int) -> tuple[Any, Any, Any]:
    """The loop that is installed, SkyRL's wrapper, and its optimizer."""
    from megatron.bridge import AutoBridge  # type: ignore[import-untyped]
    from megatron.bridge.peft import utils  # type: ignore[import-untyped]
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from transformers import LlamaConfig

    utils.enable_expert_parallel_grad_sync_in_finalize = lambda _chunks: None
    utils.finalize_model_grads_with_expert_adapter_sync = finalize_model_grads
    from skyrl.backends.skyrl_train.distributed.megatron.optimizer import get_megatron_optimizer, init_megatron_optim_config
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper
    from skyrl.train.config import OptimizerConfig, TrainerConfig

    from megatron.pipeline import install

    borders.see_the_cpu("skyrl", "megatron.bridge")
    borders.attend_in_torch()
    loop = install(schedule)
    llama = LlamaConfig(**SIZES, vocab_size=VOCABULARY, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    provider = AutoBridge.from_hf_config(llama).to_megatron_provider(load_weights=False)
    provider.pipeline_model_parallel_size, provider.variable_seq_lengths = ranks, True
    provider.moe_token_dispatcher_type = "alltoall"  # as SkyRL sets it
    provider.pipeline_dtype = provider.params_dtype = torch.float32
    provider.bf16, provider.use_cpu_initialization, provider.gradient_accumulation_fusion = False, True, False
    for name in ("masked_softmax", "bias_activation", "bias_dropout", "apply_rope"):  # of Transformer Engine and apex
        setattr(provider, f"{name}_fusion", False)
    provider.finalize()
    provider.initialize_model_parallel(seed=7)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = provider.provide_distributed_model(ddp_config=ddp, wrap_with_ddp=True, bf16=False, fp16=False)
    borders.draw(model)
    optimizer_settings = init_megatron_optim_config(
        OptimizerConfig(lr=1e-2, max_grad_norm=0.0), {"bf16": False, "params_dtype": torch.float32}
    )
    optimizer = get_megatron_optimizer(model, optimizer_settings)
    config = TrainerConfig()
    config.algorithm.use_kl_loss = False
    wrapper = MegatronModelWrapper(config, model, optimizer, PolicyLossRegistry.get("regular"))
    return loop, wrapper, optimizer


def microbatches(count: int, length: int, seed: int) -> list[dict[str, Any]]:
    """Rows of two sequences, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        mask = torch.ones(2, length, dtype=torch.long)
        mask[0, : int(torch.randint(length - ACTIONS - 1, (1,), generator=generator))] = 0
        fields = ("rollout_expert_indices", "router_padding_mask", "base_action_log_probs", "rollout_action_logprobs")
        made.append(
            dict.fromkeys(fields)
            | {
                "sequences": torch.randint(VOCABULARY, (2, length), generator=generator),
                "attention_mask": mask,
                "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
                "num_actions": ACTIONS,
                "num_microbatches": count,
                "loss_mask": torch.ones(2, ACTIONS),
                "response_mask": torch.ones(2, ACTIONS),
                "advantages": torch.randn(2, ACTIONS, generator=generator),
            }
        )
    return made


def main(row: borders.Row) -> None:
    """Train, and have the last rank of the first replica print what came of every step."""
    from megatron.core import parallel_state

    loop, wrapper, optimizer = build(row.schedule, row.ranks)
    found = []
    for step, calls in enumerate(STEPS):
        for chunk in wrapper.actor_module:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reported: list[Any] = []
        for place, (count, length) in enumerate(calls):
            batches = microbatches(count, length, 100 * parallel_state.get_data_parallel_rank() + 10 * step + place)
            wrapper.eval()
            with torch.no_grad():
                before = [wrapper.forward([dict(batch)], length, 2, temperature=0.9) for batch in batches[:1]]
                known = wrapper.forward([dict(batch) for batch in batches], length, 2, temperature=0.9)
            sent = [known]
            last, group = (
                parallel_state.get_pipeline_model_parallel_last_rank(),
                parallel_state.get_pipeline_model_parallel_group(),
            )
            torch.distributed.broadcast_object_list(sent, last, group)
            for batch, known in zip(batches, sent[0].split(2), strict=True):
                batch["old_action_log_probs"] = known
            wrapper.train()
            trained = wrapper.forward_backward_mini_batch(batches, length, 2, temperature=0.9)
            reported.append((sent[0].tolist(), before[0].tolist(), trained))
        wrapper.run_pending_grad_sync()
        _, norm, _ = optimizer.step()
        found.append((reported, float(norm)))
    steps = ", ".join(" + ".join(f"{count} x {length}" for count, length in calls) for calls in STEPS)
    borders.report(loop, STEPS[-1][-1][0], steps, found)


if __name__ == "__main__":
    borders.train(borders.start(__doc__, "ray", "wandb", "vllm", "megatron.energon", "skyrl_gym", "fastapi", "sqlmodel"), main)
