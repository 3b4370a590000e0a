"""Description of a training: all that its time and its memory depend on, as values and not as flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.pipeline.planner.schedule.core.passes import Vocabulary

HALF, SINGLE = 2, 4  # bytes of a number in fp16 or bf16, and in float32


class Ranks(NamedTuple):
    """Numbers of ranks in groups of every kind.

    Attributes:
        expert: that share the experts of a layer, among those of tensor, context and data parallelism.
        expert_tensor: neighbours that share each of these; as many as share the other layers where it is None.
    """

    tensor: int
    context: int
    expert: int
    data: int
    pipeline: int
    expert_tensor: int | None = None


@dataclass(frozen=True)
class ModelDescription:
    """A model, how ranks share it, and what they keep: ``model.description.describe`` makes it of flags that fit together.

    Fields are named as Megatron-LM's flags, and mean the same; where a release has no such flag, the default counts. The last
    ones follow from several flags.

    Attributes:
        attention_backend: the name of a kernel.
        trained: what trains: see ``Trained``.
        cuda_graph_scope: parts of layers, by name.
        exp_avg_bytes, exp_avg_sq_bytes, main_params_bytes, main_grads_bytes: of one number of the precision-aware optimizer.
        is_stock: megatron-core's own schedule runs.
        spread: how the vocabulary is sharded over all ranks of the pipeline; None where the ends have it.
        logits_limit: see ``ActivationPolicy``.
        recompute_fused_backward: W runs with a backward that makes its inputs again.
        undoes_steps: the optimizer keeps on the GPU what undoes a step.
        at_once: the optimizer steps all of a rank's weights before it gathers the first.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    kv_channels: int
    padded_vocab_size: int = 0
    global_batch_size: int = 0

    # The model.
    num_query_groups: int | None = None
    group_query_attention: bool = False
    swiglu: bool = False
    normalization: str = "LayerNorm"
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    position_embedding_type: str = "learned_absolute"
    max_position_embeddings: int = 0
    untie_embeddings_and_output_weights: bool = False
    mtp_num_layers: int | None = None
    attention_output_gate: bool = False
    softmax_type: str | None = None
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    window_size: Sequence[int] | None = None
    window_attn_skip_freq: int | list[int] | None = None
    experimental_attention_variant: str | None = None
    hybrid_layer_pattern: str | None = None
    trained: str = "all"
    # Multi-latent attention, and its indexer.
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    dsa_indexer_n_heads: int = 0
    dsa_indexer_head_dim: int = 0
    dsa_indexer_topk: int = 0
    # Mixers in place of attention.
    linear_attention_freq: int | list[int] = 1
    linear_num_key_heads: int = 0
    linear_key_head_dim: int = 0
    linear_num_value_heads: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    mamba_num_heads: int | None = None
    mamba_head_dim: int = 0
    mamba_state_dim: int = 0
    mamba_num_groups: int = 0
    # Experts.
    num_experts: int | None = None
    moe_layer_freq: int | list[int] = 1
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_overlap: bool = False
    moe_latent_size: int | None = None
    moe_token_dispatcher_type: str = "allgather"
    moe_grouped_gemm: bool = False
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_load_factor: float = 1.0
    overlap_moe_expert_parallel_comm: bool = False
    # Ranks.
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    pipeline_model_parallel_size: int = 1
    data_parallel_size: int = 1
    sequence_parallel: bool = False
    # Kernels and precisions.
    transformer_impl: str = "transformer_engine"
    attention_backend: str | None = None
    masked_softmax_fusion: bool = True
    cross_entropy_loss_fusion: bool = False
    cross_entropy_fusion_impl: str = "native"
    cuda_graph_impl: str = "none"
    cuda_graph_scope: frozenset[str] = frozenset()
    bf16: bool = False
    fp16: bool = False
    fp8: str | None = None
    fp8_recipe: str | None = None
    fp8_param_gather: bool = False
    fp4: str | None = None
    fp4_recipe: str | None = None
    fp4_param_gather: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    # What is kept from forwards to backwards.
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: Sequence[str] | None = None
    fine_grained_activation_offloading: bool = False
    offload_modules: Sequence[str] | None = None
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    # Optimizer and gradients.
    optimizer: str = "adam"
    muon: str | None = None
    sgd_momentum: float = 0.0
    use_distributed_optimizer: bool = False
    use_precision_aware_optimizer: bool = False
    exp_avg_bytes: int = SINGLE
    exp_avg_sq_bytes: int = SINGLE
    main_params_bytes: int = SINGLE
    main_grads_bytes: int = SINGLE
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    accumulate_allreduce_grads_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_grad_reduce: bool = True
    overlap_p2p_comm: bool = True
    # What follows from several flags.
    is_stock: bool = False
    spread: Vocabulary | None = None
    logits_limit: int | None = None
    recompute_fused_backward: bool = False
    undoes_steps: bool = False
    at_once: bool = False

    @property
    def tied(self) -> bool:
        """Tell whether embedding and output layer are one matrix."""
        return not self.untie_embeddings_and_output_weights

    @property
    def number(self) -> int:
        """Bytes of a weight and of an activation."""
        return HALF if self.bf16 or self.fp16 else SINGLE

    @property
    def ranks(self) -> Ranks:
        """Its layout."""
        return Ranks(
            self.tensor_model_parallel_size,
            self.context_parallel_size,
            self.expert_model_parallel_size,
            self.data_parallel_size,
            self.pipeline_model_parallel_size,
            self.expert_tensor_parallel_size,
        )

    @property
    def expert_tensor(self) -> int:
        """Ranks that share each expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def copies(self) -> int:
        """Ranks with the same parameters, those of experts left out."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def gpus(self) -> int:
        """Ranks of the training."""
        return self.copies * self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def shares_layers(self) -> bool:
        """Tell whether several ranks share a layer, and so exchange data within passes."""
        return max(self.tensor_model_parallel_size, self.context_parallel_size, self.expert_model_parallel_size) > 1

    @property
    def makes_weights_again(self) -> bool:
        """Tell whether W runs with B, since that makes its inputs again."""
        return self.recompute_granularity == "full" and self.recompute_method != "block" and self.recompute_fused_backward
