"""W of each letter of a pattern: it has the letter's linears, and with B it is the fused backward, bit for bit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from example_runs import example
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from pool import Pool
from releases import CORE

from megatron.pipeline.backward.weight_tasks import WeightTask, deferring
from megatron.pipeline.model.split_linear import split_chunks
from megatron.pipeline.runtime.stage_passes import run_weights

pytestmark = pytest.mark.skipif(CORE < (0, 19), reason="this megatron-core has no HybridModel with all letters")

# By pattern: weights that W has, and what the log says is fused.
PATTERNS = {
    "*": ("self_attention.linear_qkv self_attention.linear_proj output_layer", ""),
    "+": (
        "self_attention.linear_q_down_proj self_attention.linear_q_up_proj self_attention.linear_kv_down_proj "
        "self_attention.linear_kv_up_proj self_attention.linear_proj output_layer",
        "",
    ),
    "-": ("mlp.linear_fc1 mlp.linear_fc2 output_layer", ""),
    "E": (
        "mlp.experts.local_experts.0.linear_fc1 mlp.experts.local_experts.0.linear_fc2 mlp.experts.local_experts.1.linear_fc1 "
        "mlp.experts.local_experts.1.linear_fc2 mlp.shared_experts.linear_fc1 mlp.shared_experts.linear_fc2 output_layer",
        "mlp.router: TopKRouter; mlp.shared_experts: SharedExpertMLP",  # whose own weight is the gate's
    ),
    "M": ("mixer.in_proj mixer.out_proj output_layer", "mixer: MambaMixer"),  # whose own weight is the convolution's
    "G": ("self_attention.in_proj self_attention.out_proj output_layer", "self_attention.conv1d: Conv1d"),
    "*/-": (
        "self_attention.linear_qkv self_attention.linear_proj eh_proj mtp_model_layer.layers.0.mlp.linear_fc1 "
        "mtp_model_layer.layers.0.mlp.linear_fc2",
        "output_layer: its weight",  # used by the further token, too
    ),
}
SIZES = {
    "num_moe_experts": 2,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
    "mamba_head_dim": 16,
    "mamba_state_dim": 8,
    "mamba_num_groups": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}
LATENT: dict[str, Any] = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8}
LATENT |= {"qk_pos_emb_head_dim": 4, "v_head_dim": 6, "rope_type": "rope"}


def gradients(pattern: str, split: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Of each weight after all B of some microbatches, and after all W, by name; and what the log says is fused."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    own = example("own_training_loop")
    from reference_letters import STACK  # needs the examples' folder

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "mtp_num_layers": pattern.count("/") or None,
    }
    sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "add_bias_linear": False, "gated_linear_unit": True}
    sizes |= SIZES | (LATENT if pattern == "+" else {})
    kind = MLATransformerConfig if pattern == "+" else TransformerConfig
    config = kind(**sizes, activation_func=torch.nn.functional.silu, use_cpu_initialization=True)
    model = HybridModel(config, STACK, 64, 16, hybrid_layer_pattern=pattern)
    said = split_chunks([model]) if split else ""
    [chunk] = own.wrap([model])
    tasks: list[WeightTask] = []
    with chunk.no_sync():
        for tokens in own.batches(2, seed=1):
            losses, _ = own.forward_step(iter([tokens]), chunk)
            with deferring(tasks):
                losses.mean().backward()
    weights = {_short(name): weight for name, weight in model.named_parameters()}
    after_b = {name: weight.main_grad.clone() for name, weight in weights.items()}
    run_weights([(task, []) for task in tasks])
    return after_b, {name: weight.main_grad.clone() for name, weight in weights.items()}, said


def _short(name: str) -> str:
    return re.sub(r"\b(decoder|mtp)\.layers\.0\.|\.weight$", "", name)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_w_has_the_linears_and_the_log_names_what_is_fused(pool: Pool, pattern: str) -> None:
    linears, named = PATTERNS[pattern]
    [(_, fused, _)] = pool.run(1, gradients, pattern, False)
    [(after_b, after_w, said)] = pool.run(1, gradients, pattern, True)
    assert {name for name, gradient in after_w.items() if not torch.equal(gradient, fused[name])} == set()
    assert {name for name, gradient in fused.items() if not torch.equal(gradient, after_b[name])} == set(linears.split())
    parts = said.removeprefix("backward is not split, runs fused in B: ").split("; ")
    assert [_short(part.partition(" has ")[0]) for part in parts] == named.split("; ")
