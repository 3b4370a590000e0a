"""Hybrid models: every layer has one part, of a kind that a pattern names by a symbol, instead of attention and an MLP.

A new kind is one file with a function that makes a ``Mixer`` of flags, and one entry of ``KINDS``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.pipeline.shape import mamba
from megatron.pipeline.shape.mixer import Mixer

ATTENTION, MLP, EXPERTS = "*", "-", "E"
FLAGS = "hybrid_layer_pattern", "is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio"  # each makes a model hybrid
KINDS: Mapping[str, Callable[[Namespace], Mixer]] = {"M": mamba.mixer}


@dataclass(frozen=True)
class Hybrid:
    """Layers of a hybrid model, by their kinds.

    Attributes:
        layers: the symbol of every layer.
        predictor: those of a layer of multi-token prediction.
        mixers: the kinds of ``KINDS`` that are among them, by symbol.
    """

    layers: tuple[str, ...]
    predictor: tuple[str, ...]
    mixers: tuple[tuple[str, Mixer], ...]

    @classmethod
    def of(cls, args: Namespace) -> Hybrid | None:
        """From Megatron-LM's flags after ``validate``; None for a GPT."""
        pattern = getattr(args, "hybrid_layer_pattern", None)
        if not pattern:
            return None
        layers, *further = pattern.replace("|", "").split("/")
        mixers = tuple((symbol, kind(args)) for symbol, kind in KINDS.items() if symbol in pattern)
        return cls(tuple(layers), tuple(further[0]) if further else (), mixers)

    def share(self, symbol: str) -> float:
        """Share of the layers that are of a kind."""
        return self.layers.count(symbol) / len(self.layers)
