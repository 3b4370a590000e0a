"""Files of gradients that ranks write, and where those of two trainings differ first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(?:(\d+)\.)?(.*)")
_SECTIONS = ("embedding", "decoder.layers", "decoder", "mtp", "output_layer")  # in the model's order
_FURTHER = "further token "  # a layer of multi-token prediction
SMALL = 1e-2  # of the largest gradient of the model: smaller ones of a weight are compared with this
# Relative to the largest element of a weight's gradient, in the first iteration: what sums in another order explain in float32,
# and in 16 bits. Each optimizer step may then make it ten times as much.
TOLERANCE = {False: 1e-5, True: 5e-2}
DRIFT = 10.0


class WeightPart(NamedTuple):
    """A rank's part of the gradient of one layer's weight, or of one of its experts.

    Attributes:
        key: the weight's name in checkpoints, which may have no number of a layer.
        numbers: of the layer, where ``key`` has none, and of the expert.
        shape, offset: of the whole, and of this part in it.
    """

    key: str
    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor

    @classmethod
    def of(cls, tensor: Any) -> WeightPart:
        """From megatron-core's ``ShardedTensor``; the values are copied to the CPU."""
        ahead, shape, offset = tensor.prepend_axis_num, tuple(tensor.global_shape), tuple(tensor.global_offset)
        return cls(tensor.key, offset[:ahead], shape[ahead:], offset[ahead:], tensor.data.detach().cpu().clone())

    @property
    def place(self) -> tuple[slice, ...]:
        """Its place in the whole."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.values.shape, strict=True))


@dataclass(frozen=True)
class Weight:
    """A weight by its place in the model: ``layer`` counts from 1; None where it belongs to none.

    Attributes:
        place: sorts weights by their place in the model, as far as their layers do.
    """

    place: tuple[int, int]
    layer: int | None
    name: str

    @classmethod
    def of(cls, part: WeightPart) -> Weight:
        index, key, layer = list(part.numbers), part.key, None
        section = next(number for number, name in enumerate((*_SECTIONS, "")) if key.startswith(name))
        if found := _LAYER.fullmatch(key):
            layer = 1 + (int(found[2]) if found[2] else index.pop(0))
            key = found[3] if found[1] == "decoder" else f"{_FURTHER}{layer}'s {found[3]}"
        name = key + "".join(f" of expert {number + 1}" for number in index)
        return cls((section, layer or 0), layer, name)

    def __str__(self) -> str:
        return self.name if self.layer is None or self.name.startswith(_FURTHER) else f"layer {self.layer} {self.name}"


class Difference(NamedTuple):
    """A number, or a weight's gradient, of one iteration in two trainings.

    Attributes:
        absolute: the largest difference of an element.
        relative: the same over the largest element of the reference.
        ranks: that have the gradient in the training that is checked.
    """

    what: str
    absolute: float
    relative: float
    ranks: tuple[int, ...] = ()


class Compared(NamedTuple):
    """Difference of two trainings in one iteration.

    Attributes:
        tolerance: relative, what sums in another order explain.
        numbers: loss and gradient norm.
        gradients: in the order of a backward.
    """

    number: int
    tolerance: float
    numbers: tuple[Difference, Difference]
    gradients: list[Difference]

    @property
    def beyond(self) -> list[Difference]:
        """Differences beyond the tolerance: the loss, gradients in the order of the backward, and last the norm."""
        loss, norm = self.numbers
        return [one for one in (loss, *self.gradients, norm) if not one.relative <= self.tolerance]


def write(folder: Path, iteration: int, rank: int, parts: list[WeightPart]) -> None:
    torch.save([tuple(part) for part in parts], folder / f"{iteration}-{rank}.pt")


def compared(
    reference: Path, checked: Path, numbers: list[tuple[dict[str, Any], dict[str, Any]]], low: bool
) -> Iterator[Compared]:
    """Compare two trainings, iteration by iteration.

    Args:
        reference, checked: the folders with their gradients.
        numbers: the metrics of every iteration of both.
        low: whether they are in 16 bits.
    """
    for number, (theirs, ours) in enumerate(numbers, start=1):
        pairs = [(name, theirs[key], ours[key]) for name, key in (("loss", "loss"), ("gradient norm", "grad_norm"))]
        loss, norm = (_number(name, one or 0.0, other or 0.0) for name, one, other in pairs)
        tolerance = TOLERANCE[low] * DRIFT ** (number - 1)
        yield Compared(number, tolerance, (loss, norm), _gradients(read(reference, number), read(checked, number)))


def _number(name: str, one: float, other: float) -> Difference:
    return Difference(name, abs(one - other), abs(one - other) / abs(one) if one else float(one != other))


def read(folder: Path, iteration: int) -> dict[Weight, tuple[torch.Tensor, list[int]]]:
    """Whole gradients of an iteration, and which ranks wrote them."""
    found: dict[Weight, tuple[torch.Tensor, list[int]]] = {}
    for path in sorted(folder.glob(f"{iteration}-*.pt"), key=lambda path: int(path.stem.partition("-")[2])):
        for part in (WeightPart(*one) for one in torch.load(path)):
            whole, ranks = found.setdefault(Weight.of(part), (torch.zeros(part.shape), []))
            whole[part.place] = part.values
            ranks.append(int(path.stem.partition("-")[2]))
    return found


def _gradients(theirs: dict[Weight, Any], ours: dict[Weight, Any]) -> list[Difference]:
    if strange := theirs.keys() ^ ours.keys():
        one = min(strange, key=lambda weight: weight.place)
        raise RuntimeError(f"{one} is in one of the two models alone: they are not the same model")
    largest = max(float(whole.abs().max()) for whole, _ in theirs.values())
    found, weights = [], list(theirs)[::-1]
    weights.sort(key=lambda weight: weight.place, reverse=True)
    for weight in weights:
        (one, _), (other, ranks) = theirs[weight], ours[weight]
        absolute = float((one - other).abs().max())
        scale = max(float(one.abs().max()), SMALL * largest) or 1.0
        found.append(Difference(str(weight), absolute, absolute / scale, tuple(sorted(set(ranks)))))
    return found
