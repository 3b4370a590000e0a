"""Experts that replace the MLP in some layers of a model."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron.pipeline.planner.shape.activation_policy import ITERATION, LAYERS, graphed, graphs
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
        graphs: CUDA graphs launch the rest of such a layer; None where they launch its experts as well.
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
    graphs: bool | None = False
    load: float = 1.0
    grouped: bool = True
    beside: bool = False
    latent: int | None = None

    @classmethod
    def of(cls, args: Namespace) -> Experts | None:
        """From Megatron-LM's flags after ``validate``; None for a model without."""
        if not args.num_experts:
            return None
        return cls(
            have_experts(args),
            args.num_experts,
            args.moe_router_topk,
            args.moe_ffn_hidden_size,
            args.moe_shared_expert_intermediate_size or 0,
            args.ffn_hidden_size,
            args.expert_model_parallel_size,
            args.expert_tensor_parallel_size,
            args.moe_token_dispatcher_type == "allgather",
            args.moe_token_dispatcher_type == "flex",
            _graphs(args),
            _load(args),
            args.moe_grouped_gemm,
            getattr(args, "moe_shared_expert_overlap", False),
            getattr(args, "moe_latent_size", None),
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


def _load(args: Namespace) -> float:
    """Load of the rank with most tokens: as it is stated, or as far as the capacity of experts lets it be."""
    load, capacity = getattr(args, "moe_load_factor", 1.0), args.moe_expert_capacity_factor
    if capacity is None:
        return load
    return capacity if args.moe_pad_expert_input_to_capacity else min(load, capacity)


def _graphs(args: Namespace) -> bool | None:
    kind = graphs(args)
    return None if kind == ITERATION or (kind == LAYERS and "moe" in graphed(args)) else kind == LAYERS
