"""Multi-latent attention, whose queries, keys and values are made from narrow vectors."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.hybrid import SPARSE


@dataclass(frozen=True)
class Indexer:
    """Index scores of every key, of which a query's attention then reads the ``keys`` with the highest.

    DeepSeek-AI, "DeepSeek-V3.2", section 2.1. All ranks that share a layer have it whole, and compute it whole. Attention is then
    between narrow vectors, as one key and one value for all heads.

    Attributes:
        heads, width: of its queries; its key is one for all heads.
        keys: that attention reads.
    """

    heads: int
    width: int
    keys: int

    @classmethod
    def of(cls, model: ModelDescription) -> Indexer | None:
        """From a training's description; None for attention to all keys."""
        if model.experimental_attention_variant != SPARSE:
            return None
        return cls(model.dsa_indexer_n_heads, model.dsa_indexer_head_dim, min(model.dsa_indexer_topk, model.seq_length))

    def weights(self, hidden: int, queries: int | None) -> int:
        """Weights of its queries, of its key, and of what weighs its heads."""
        return (queries or hidden) * self.heads * self.width + hidden * (self.width + self.heads)


@dataclass(frozen=True)
class Latent:
    """Multi-latent attention: queries, and keys and values, are made from narrow vectors.

    DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", section 2.1. A head's query
    and key are one part from these vectors and one that carries the position; that of keys is the same for all heads.

    Attributes:
        queries: width of what queries are made from; None where that is the hidden state.
        keys: width of what keys and values are made from.
        position: width of the part with the position.
        values: width of a head's values.
        indexer: what chooses the keys that attention reads, if not all are read.
    """

    queries: int | None
    keys: int
    position: int
    values: int
    indexer: Indexer | None = None

    @classmethod
    def of(cls, model: ModelDescription) -> Latent | None:
        """From a training's description; None for a model without."""
        if not model.multi_latent_attention:
            return None
        return cls(model.q_lora_rank, model.kv_lora_rank, model.qk_pos_emb_head_dim, model.v_head_dim, Indexer.of(model))

    @property
    def normalised(self) -> int:
        """Width of what has a norm, where there are norms."""
        return (self.queries or 0) + self.keys

    @property
    def width(self) -> int:
        """Width of all that is made from hidden states."""
        return self.normalised + self.position
