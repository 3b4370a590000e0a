"""Models whose layers differ: every layer has one part, of a kind that a pattern names by a symbol, or another one in place of
attention.

A new kind is one file with a function that makes a ``Mixer`` of flags, and one entry of ``KINDS``. ``Pattern`` is all that reads
the text of a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.names import counted
from megatron.pipeline.planner.shape import gated_delta, mamba
from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.mixer import Mixer
from megatron.pipeline.planner.shape.stages import numbers_of_layers

ATTENTION, MLP, EXPERTS, LATENT, INDEXED = "*", "-", "E", "+", "D"
KINDS: Mapping[str, Callable[[ModelDescription], Mixer]] = {"M": mamba.mixer, "G": gated_delta.mixer}
LINEAR, SPARSE = "gated_delta_net", "dsa"  # of --experimental-attention-variant
LETTERS = (*KINDS, ATTENTION, MLP, EXPERTS, LATENT, INDEXED)
_STAGE, _FURTHER = "|", "/"


@dataclass(frozen=True)
class Pattern:
    """Layers of a hybrid model as ``--hybrid-layer-pattern`` has them: a letter each.

    Attributes:
        letters: of the layers.
        counts: of the layers between ``|``, which are stages in the model's order; all of them where there is none.
        predictors: letters behind each ``/``, of layers that predict one token further.
    """

    letters: str
    counts: tuple[int, ...]
    predictors: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Pattern:
        """From its text.

        Raises:
            ValueError: a letter is unknown, or some do not go together; says what to change.
        """
        main, *further = text.split(_FURTHER)
        if unknown := sorted(set(text) - {*LETTERS, _STAGE, _FURTHER}):
            raise ValueError(
                f"{text} with {' and '.join(unknown)}: known are {' '.join(LETTERS)} (Mamba-2, gated delta net, attention, MLP, "
                "experts, latent attention, sparse attention), | between stages, / before layers that predict further"
            )
        if len(kinds := [letter for letter in (ATTENTION, LATENT, INDEXED) if letter in text]) > 1:
            raise ValueError(f"{text} has attention of {len(kinds)} kinds, {' and '.join(kinds)}: give one of them")
        if len(set(further)) > 1 or _STAGE in "".join(further):
            raise ValueError(f"{text} predicts further by {' and '.join(further)}: give the same symbols behind every /")
        stages = main.split(_STAGE)
        if not any(stages):
            raise ValueError(f"{text} has no layers: give some of {' '.join(LETTERS)} before the first /")
        return cls("".join(stages), tuple(map(len, stages)), tuple(further))

    @property
    def whole(self) -> str:
        """Its text without ``|``."""
        return self.cut([len(self.letters)])

    def __str__(self) -> str:
        return self.cut(self.counts)

    def chunks(self, schedule: str, ranks: int) -> int | None:
        """Chunks per rank that ``|`` asks for; None without any.

        Raises:
            ValueError: the family has other numbers of stages, or ranks cannot share these evenly; says what to change.
        """
        if len(self.counts) == 1:
            return None
        (chunks, over), family = divmod(len(self.counts), ranks), families.FAMILIES.get(schedule)
        if over or (family and chunks != family.chunks and not (family.any_chunks and chunks >= family.least_chunks)):
            self.on(ranks * (family.chunks if family else 1))
        return chunks

    def on(self, stages: int) -> tuple[int, ...]:
        """Layers of every stage, where ``|`` ends each.

        Raises:
            ValueError: there are other numbers of stages; says what to change.
        """
        if len(self.counts) != stages:
            raise ValueError(
                f"{self} has {len(self.counts)} stages, and the schedule has {stages}: leave | out, or write it "
                f"{counted(stages - 1, 'time')}"
            )
        return self.counts

    def cut(self, counts: Sequence[int]) -> str:
        """Its text with these numbers of layers on the stages."""
        stages = (self.letters[own.start : own.stop] for own in numbers_of_layers(counts))
        return _FURTHER.join([_STAGE.join(stages), *self.predictors])


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
        found = Pattern.of(pattern) if pattern else None
        layers = [*map(_part, found.letters)] if found else _with_linear_attention(model)
        mixers = tuple((symbol, kind(model)) for symbol, kind in KINDS.items() if any(symbol in layer for layer in layers))
        return cls(tuple(layers), tuple(map(_part, found.predictors[0])) if found and found.predictors else (), mixers)

    def share(self, symbol: str) -> float:
        """Share of the layers that are of a kind."""
        return sum(symbol in layer for layer in self.layers) / len(self.layers)


def have_experts(model: ModelDescription) -> tuple[bool, ...]:
    """Tell of each layer if it has experts, from Megatron-LM's flags after ``validate``."""
    every, pattern = model.moe_layer_freq, model.hybrid_layer_pattern
    if not model.num_experts:
        return (False,) * model.num_layers
    if pattern:
        return tuple(symbol == EXPERTS for symbol in Pattern.of(pattern).letters)
    return tuple(layer % every == 0 for layer in range(model.num_layers)) if isinstance(every, int) else tuple(map(bool, every))


def _part(letter: str) -> str:
    """Part of a layer, which is attention of whichever kind the model has."""
    return ATTENTION if letter in (LATENT, INDEXED) else letter


def _with_linear_attention(model: ModelDescription) -> list[str]:
    """Attention in every Nth layer, or where a list has 0."""
    every = model.linear_attention_freq
    linear = every if isinstance(every, list) else [(layer + 1) % every for layer in range(model.num_layers)]
    return [("G" if one else ATTENTION) + (EXPERTS if has else MLP) for one, has in zip(linear, have_experts(model), strict=True)]
