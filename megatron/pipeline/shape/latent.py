"""Multi-latent attention, whose queries, keys and values are made from narrow vectors."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass


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
    """

    queries: int | None
    keys: int
    position: int
    values: int

    @classmethod
    def of(cls, args: Namespace) -> Latent | None:
        """From Megatron-LM's flags after ``validate``; None for a model without."""
        if not args.multi_latent_attention:
            return None
        return cls(args.q_lora_rank, args.kv_lora_rank, args.qk_pos_emb_head_dim, args.v_head_dim)

    @property
    def normalised(self) -> int:
        """Width of what has a norm, where there are norms."""
        return (self.queries or 0) + self.keys

    @property
    def width(self) -> int:
        """Width of all that is made from hidden states."""
        return self.normalised + self.position
