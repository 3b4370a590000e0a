"""Precision of a layer's linears: in what their products run, and the bytes of the numbers that they keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.pipeline.planner.shape.description import HALF, ModelDescription


class Recipe(NamedTuple):
    """A recipe of Transformer Engine.

    Attributes:
        peak: the name of these products in a GPU's file.
        number: bytes of a number of an input or of a gradient, with its share of the scales of its block.
        gathered: bytes of a weight that ranks gather where weights are kept in this precision.
        reads: how often a number in 16 bits is read until it is in this precision: twice where all of them scale each, or where
            they are rotated.
    """

    peak: str
    number: float
    gathered: float
    reads: int = 1

    @property
    def weight(self) -> float:
        """Bytes of a weight: one copy for products by rows, and one for those by columns."""
        return 2 * self.number

    def copies(self, transposes: bool) -> int:
        """Copies of a weight that stay: one where a tensor has one scale, and the GPU's products need no transpose of it."""
        return 1 if self.number == 1 and not transposes else 2


# Blocks have a scale: of 128 numbers 4 bytes, of 32 one (OCP's Microscaling Formats), of 16 one (NVFP4). Megatron-LM gathers
# mxfp8's and nvfp4's weights in 16 bits, and rounds them afterwards.
RECIPES = {
    "delayed": Recipe("fp8", 1, 1),
    "tensorwise": Recipe("fp8", 1, 1, 2),
    "blockwise": Recipe("fp8", 1 + 4 / 128, 1),
    "mxfp8": Recipe("mxfp8", 1 + 1 / 32, HALF),
    "nvfp4": Recipe("nvfp4", 1 / 2 + 1 / 16, HALF, 2),
}


@dataclass(frozen=True)
class Quantized:
    """Linears in fewer than 16 bits: those of layers, not the router, and neither attention's products nor the output layer.

    Attributes:
        recipe: how.
        layers: of every layer of the model, whether its linears are.
        kept: whether weights are kept so, instead of copies of weights in 16 bits.
    """

    recipe: Recipe
    layers: tuple[bool, ...]
    kept: bool = False

    @classmethod
    def of(cls, model: ModelDescription) -> Quantized | None:
        """From a training's description; None for a model in 16 bits or more.

        Raises:
            ValueError: the recipe is none whose sizes are known.
        """
        if not (model.fp8 or model.fp4):
            return None
        kind = "fp8" if model.fp8 else "fp4"
        name = (model.fp8_recipe or "delayed") if model.fp8 else (model.fp4_recipe or "nvfp4")
        if name not in RECIPES:
            raise ValueError(f"--{kind}-recipe {name}: its bytes and its speed are not known; known are {', '.join(RECIPES)}")
        first, last = 0, model.num_layers
        if model.first_last_layers_bf16:
            first += model.num_layers_at_start_in_bf16
            last -= model.num_layers_at_end_in_bf16
        layers = tuple(first <= layer < last for layer in range(model.num_layers))
        return cls(RECIPES[name], layers, model.fp8_param_gather if model.fp8 else model.fp4_param_gather)

    @property
    def share(self) -> float:
        """Share of the layers whose linears are."""
        return sum(self.layers) / len(self.layers)

    def mean(self, whole: float, quantized: float) -> float:
        """Mean over the layers of a number that is ``whole`` in 16 bits and ``quantized`` in this precision."""
        return self.share * quantized + (1 - self.share) * whole
