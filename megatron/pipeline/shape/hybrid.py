"""Hybrid models: every layer has one part, of a kind that a pattern names by a symbol, instead of attention and an MLP.

A new kind is one file with a ``Mixer``, and one entry of ``KINDS``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron.pipeline.shape.mamba import Mamba

ATTENTION, MLP, EXPERTS = "*", "-", "E"
FLAGS = "hybrid_layer_pattern", "is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio"  # each makes a model hybrid


class Mixer(Protocol):
    """Kind of layer in place of attention, in numbers for each token, of all ranks that share a layer by its heads.

    Attributes:
        projected, mixed: widths of what its first linear makes of hidden states, and of what its last one reads.
        kept: numbers that F keeps for B beside those, which W needs too.
        parameters: those that are no matrices of its two linears.
    """

    @property
    def projected(self) -> int: ...
    @property
    def mixed(self) -> int: ...
    @property
    def kept(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def operations(self) -> tuple[float, float]:
        """Operations of F and B that have no weights."""
        ...

    @property
    def moved(self) -> tuple[float, float]:
        """Numbers that F and B read and write outside of products."""
        ...


KINDS: Mapping[str, Callable[[Namespace], Mixer]] = {"M": Mamba.of}


@dataclass(frozen=True)
class Hybrid:
    """What the layers of a hybrid model are.

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
