"""Experts that replace the MLP in some layers of a model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.hybrid import have_experts


@dataclass(frozen=True)
class Experts:
    """The experts that replace the MLP in some layers.

    Attributes:
        layers: of every layer of the model, whether it has experts.
        count, topk: experts of such a layer, and those of them that a token passes.
        ffn, shared_ffn: width of an expert, and of those that every token passes.
        dense_ffn: width of the MLP of the other layers.
        parallel, tensor: ranks that share the experts of a layer, and ranks that share each of them.
        gathered: every rank gets the tokens of all that share the experts, instead of those for its own experts alone.
        once: a token goes to a node once, and to each rank there once: DeepEP, HybridEP.
        load: tokens that visit the experts of the rank with most, over the mean over all ranks.
        grouped: all experts of a rank are one product, instead of one after another.
        beside: experts that every token passes run beside the exchange of tokens.
        latent: width of the tokens that visit experts, which a linear of all ranks makes of hidden states, and another makes
            hidden states of; None where experts read these themselves.
    """

    layers: tuple[bool, ...]
    count: int
    topk: int
    ffn: int
    shared_ffn: int
    dense_ffn: int
    parallel: int = 1
    tensor: int = 1
    gathered: bool = False
    once: bool = False
    load: float = 1.0
    grouped: bool = True
    beside: bool = False
    latent: int | None = None

    @classmethod
    def of(cls, model: ModelDescription) -> Experts | None:
        """From a training's description; None for a model without."""
        if not model.num_experts:
            return None
        return cls(
            have_experts(model),
            model.num_experts,
            model.moe_router_topk,
            model.moe_ffn_hidden_size,
            model.moe_shared_expert_intermediate_size or 0,
            model.ffn_hidden_size,
            model.expert_model_parallel_size,
            model.expert_tensor,
            model.moe_token_dispatcher_type == "allgather",
            model.moe_token_dispatcher_type == "flex",
            _load(model),
            model.moe_grouped_gemm,
            model.moe_shared_expert_overlap,
            model.moe_latent_size,
        )

    @property
    def visits(self) -> float:
        """Experts that a token visits, on the rank with most of such tokens."""
        return self.topk * self.load

    @property
    def share(self) -> float:
        """Share of the layers that have experts."""
        return sum(self.layers) / len(self.layers)

    @property
    def mean_routed_ffn(self) -> float:
        """Width of the experts that a token passes, as a mean over all layers."""
        return self.share * (self.visits * self.ffn + self.shared_ffn)

    @property
    def mean_visited_ffn(self) -> float:
        """The same without the experts that every token passes."""
        return self.share * self.visits * self.ffn

    @property
    def mean_ffn(self) -> float:
        """Width of the MLP that a token passes, as a mean over all layers."""
        return self.mean_routed_ffn + (1 - self.share) * self.dense_ffn


def _load(model: ModelDescription) -> float:
    """Load of the rank with most tokens: as it is stated, or as far as the capacity of experts lets it be."""
    load, capacity = model.moe_load_factor, model.moe_expert_capacity_factor
    if capacity is None:
        return load
    return capacity if model.moe_pad_expert_input_to_capacity else min(load, capacity)
