"""Models whose layers differ: every layer has one part, of a kind that a pattern names by a symbol, or another one in place of
attention.

A new kind is one file with a function that makes a ``Mixer`` of flags, and one entry of ``KINDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.pipeline.planner.shape import gated_delta, mamba
from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.mixer import Mixer

ATTENTION, MLP, EXPERTS = "*", "-", "E"
FLAGS = "hybrid_layer_pattern", "is_hybrid_model", "hybrid_attention_ratio", "hybrid_mlp_ratio"  # each makes a model hybrid
KINDS: Mapping[str, Callable[[ModelDescription], Mixer]] = {"M": mamba.mixer, "G": gated_delta.mixer}
LINEAR, SPARSE = "gated_delta_net", "dsa"  # of --experimental-attention-variant


@dataclass(frozen=True)
class Hybrid:
    """Layers by their kinds.

    Attributes:
        layers: the symbols of every layer: one of a hybrid model, otherwise that in place of attention, and an MLP's or experts'.
        predictor: those of a layer of multi-token prediction.
        mixers: the kinds of ``KINDS`` that are among them, by symbol.
    """

    layers: tuple[str, ...]
    predictor: tuple[str, ...]
    mixers: tuple[tuple[str, Mixer], ...]

    @classmethod
    def of(cls, model: ModelDescription) -> Hybrid | None:
        """From a training's description; None for a GPT whose layers all have attention."""
        pattern = model.hybrid_layer_pattern
        if not pattern and model.experimental_attention_variant != LINEAR:
            return None
        layers, *further = pattern.replace("|", "").split("/") if pattern else [_with_linear_attention(model)]
        mixers = tuple((symbol, kind(model)) for symbol, kind in KINDS.items() if any(symbol in layer for layer in layers))
        return cls(tuple(layers), tuple(further[0]) if further else (), mixers)

    def share(self, symbol: str) -> float:
        """Share of the layers that are of a kind."""
        return sum(symbol in layer for layer in self.layers) / len(self.layers)


def segments(pattern: str | None) -> list[str]:
    """The letters of the stages between which a pattern has ``|``, in the model's order; one string of all without any."""
    return (pattern or "").partition("/")[0].split("|")


def have_experts(model: ModelDescription) -> tuple[bool, ...]:
    """Tell of each layer if it has experts, from Megatron-LM's flags after ``validate``."""
    every, pattern = model.moe_layer_freq, model.hybrid_layer_pattern
    if not model.num_experts:
        return (False,) * model.num_layers
    if pattern:
        return tuple(symbol == EXPERTS for symbol in pattern.partition("/")[0].replace("|", ""))
    return tuple(layer % every == 0 for layer in range(model.num_layers)) if isinstance(every, int) else tuple(map(bool, every))


def _with_linear_attention(model: ModelDescription) -> list[str]:
    """Attention in every Nth layer, or where a list has 0."""
    every = model.linear_attention_freq
    linear = every if isinstance(every, list) else [(layer + 1) % every for layer in range(model.num_layers)]
    return [("G" if one else ATTENTION) + (EXPERTS if has else MLP) for one, has in zip(linear, have_experts(model), strict=True)]
