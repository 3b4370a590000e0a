"""What of a model trains: all of it, some whole layers, or low-rank adapters (LoRA) beside linears that are frozen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from megatron.pipeline.planner.shape.description import ModelDescription

ALL, NONE, _LORA = "all", "none", "lora:"
WIDE_INPUTS = ("linear_qkv", "linear_fc1")  # which read hidden states; the other two make some
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
EMBEDDING, OUTPUT = "embedding", "output"
_NUMBERS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?(?:/(\d{1,9}))?")
_EVERY = (0, 10**9)
_UNREACHED, _PASSED, _TRAINS = range(3)  # of a layer: no backward comes there, B alone runs, something of it trains
ALLOWED = (
    f"give {ALL}, {NONE} (what trains comes before the layers), layers=16-31 (from 0; more of them, {EMBEDDING}, {OUTPUT} behind "
    f"commas), or {_LORA}r=16 (also with some of {', '.join(TARGETS)}, which is all of them, and with layers=..)"
)


@dataclass(frozen=True)
class Trained:
    """Which weights train.

    Attributes:
        rank: of adapters; 0 where layers train whole.
        targets: the linears with adapters.
        runs: the first and the last of the layers that train, for each run of them.
        ends: which of ``EMBEDDING`` and ``OUTPUT`` train.
        count: layers of the model, where the text says it.
        layers: ``_UNREACHED``, ``_PASSED`` or ``_TRAINS`` of every layer.
    """

    rank: int = 0
    targets: tuple[str, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()
    ends: frozenset[str] = frozenset()
    count: int | None = None
    layers: tuple[int, ...] = ()

    @classmethod
    def read(cls, text: str, layers: int | None = None) -> Trained | None:
        """From a flag's text; None for all.

        Args:
            layers: of the model, where that is known.

        Raises:
            ValueError: it cannot be read, or the model has no such layers; says what is allowed.
        """
        if text in (ALL, NONE):
            return cls() if text == NONE else None
        low_rank, rank, ends = text.startswith(_LORA), 0, set()
        targets: list[str] = []
        runs: list[tuple[int, int]] = []
        counts = {layers} if layers else set()
        for item in text.removeprefix(_LORA).split(","):
            name, _, value = item.rpartition("=")
            numbers = _NUMBERS.fullmatch(value)
            if numbers and (name == "layers" or (not name and runs)) and int(numbers[1]) <= int(numbers[2] or numbers[1]):
                runs.append((int(numbers[1]), int(numbers[2] or numbers[1])))
                counts |= {int(numbers[3])} if numbers[3] else set()
            elif low_rank and name == "r" and value.isdecimal() and int(value) and not rank:
                rank = int(value)
            elif low_rank and item in TARGETS:
                targets.append(item)
            elif item in (EMBEDDING, OUTPUT):
                ends.add(item)
            else:
                raise ValueError(f"{text}: {item or 'nothing'} is none of what can stand there: {ALLOWED}")
        if low_rank and not rank:
            raise ValueError(f"{text} has no r, the rank of the adapters: {ALLOWED}")
        if len(counts) > 1:
            raise ValueError(f"{text}: the model has {' or '.join(map(str, sorted(counts)))} layers? Give its number behind /")
        count = next(iter(counts), None)
        if count and (last := max((last for _, last in runs), default=0)) >= count:
            raise ValueError(f"{text}: there is no layer {last}; the model has layers 0-{count - 1}")
        runs = runs or [_EVERY] * low_rank
        return cls(rank, tuple(targets or TARGETS * low_rank), tuple(runs), frozenset(ends), count)

    @classmethod
    def of(cls, model: ModelDescription) -> Trained | None:
        """From a training's description; None where all trains.

        Raises:
            ValueError: as ``read``.
        """
        found = cls.read(model.trained, model.num_layers)
        if found and found.ends and model.tied:  # one matrix
            found = replace(found, ends=frozenset((EMBEDDING, OUTPUT)))
        return found and found.on(model.num_layers)

    def on(self, count: int) -> Trained:
        """The same of a model of that many layers."""
        trains = [any(first <= layer <= last for first, last in self.runs) for layer in range(count)]
        # Before the first that trains nothing needs a gradient; where none does, what is before the layers.
        first = trains.index(True) if any(trains) else count * bool(self.ends)
        first = 0 if EMBEDDING in self.ends else first
        return replace(self, layers=tuple(_TRAINS if one else _PASSED * (at >= first) for at, one in enumerate(trains)))

    @property
    def backward(self) -> float:
        """Share of the layers in which B runs."""
        return sum(map(bool, self.layers)) / len(self.layers)

    @property
    def chosen(self) -> float:
        """Share of the layers that train, whole or by adapters."""
        return self.layers.count(_TRAINS) / len(self.layers)

    @property
    def whole(self) -> float:
        """Share of the layers that train whole."""
        return 0.0 if self.rank else self.chosen

    def stages(self, depth: int) -> Iterator[tuple[float, float]]:
        """Shares of every stage's layers in which B runs, and which train whole, where as many are on each.

        Raises:
            ValueError: layers are named, and not of how many.
        """
        if self.count is None and any(run != _EVERY for run in self.runs):
            raise ValueError("layers are named: say of how many, such as layers=16-31/32")
        found = self.on(count := self.count or depth)
        for stage in range(depth):
            first, end = Fraction(stage * count, depth), Fraction((stage + 1) * count, depth)
            own = [(max(0, min(end, at + 1) - max(first, at)) / (end - first), state) for at, state in enumerate(found.layers)]
            trains = sum(share for share, state in own if state == _TRAINS and not self.rank)
            yield float(sum(share for share, state in own if state)), float(trains)
