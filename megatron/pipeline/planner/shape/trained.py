"""Weights that train: all, those of some whole layers, or low-rank adapters (LoRA) beside linears that are frozen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.pipeline.planner.shape.description import ModelDescription

EMBEDDING, OUTPUT = "embedding", "output"
WIDE_INPUTS = ("linear_qkv", "linear_fc1")  # which read hidden states; the other two make some
_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_RANK, _RUN = re.compile(r"r=([1-9]\d{0,5})"), re.compile(r"(?:layers=)?(\d{1,9})(?:-(\d{1,9}))?(?:/(\d{1,9}))?")
_EVERY = (0, 10**9)
_UNREACHED, _PASSED, _TRAINS = range(3)  # of a layer: no backward comes there, B alone runs, something of it trains
_ALLOWED = f"give all, none, layers=0,30-31 (from 0), {EMBEDDING} or {OUTPUT}, or lora:r=16"
_OF_ADAPTERS = f"give lora:r=16, behind it layers=16-31, and some of {', '.join(_TARGETS)}"


@dataclass(frozen=True)
class Trained:
    """Choice of the weights that train.

    Attributes:
        rank: of adapters; 0 where layers train whole.
        names: the linears with adapters, and which of ``EMBEDDING`` and ``OUTPUT`` train.
        runs: the first and the last of the layers that train, for each run of them.
        count: layers of the model, where that is known.
        layers: ``_UNREACHED``, ``_PASSED`` or ``_TRAINS`` of every layer.
    """

    rank: int = 0
    names: frozenset[str] = frozenset()
    runs: tuple[tuple[int, int], ...] = ()
    count: int | None = None
    layers: tuple[int, ...] = ()

    @classmethod
    def read(cls, text: str, count: int | None = None) -> Trained | None:
        """From a flag's text; None for all.

        Args:
            count: of the model's layers, where that is known; otherwise the text may have it behind ``/``.

        Raises:
            ValueError: it cannot be read, or the model has no such layers; says what is allowed.
        """
        if text in ("all", "none"):
            return cls(count=count) if text == "none" else None
        targets, allowed = (_TARGETS, _OF_ADAPTERS) if text.startswith("lora:") else ((), _ALLOWED)
        rank, names, runs, counts = 0, set[str](), list[tuple[int, int]](), {count} - {None}
        for item in text.removeprefix("lora:").split(","):
            run, given = _RUN.fullmatch(item), _RANK.fullmatch(item)
            if run and int(run[1]) <= int(run[2] or run[1]):
                runs.append((int(run[1]), int(run[2] or run[1])))
                counts |= {int(run[3])} if run[3] else set()
            elif given and targets and not rank:
                rank = int(given[1])
            elif item in (EMBEDDING, OUTPUT, *targets):
                names.add(item)
            else:
                raise ValueError(f"{text}: {item or 'nothing'} cannot stand there: {allowed}")
        if targets and not rank:
            raise ValueError(f"{text} does not say r, the rank of the adapters: {allowed}")
        most = count or next(iter(counts), None) or _EVERY[1]
        if counts and most > 10_000:  # as of --num-layers
            raise ValueError(f"{text}: a model has at most 10,000 layers")
        if len(counts) > 1 or any(last >= most for _, last in runs):
            raise ValueError(f"{text}: the model has layers 0-{most - 1}")
        names |= {*targets} if names.isdisjoint(targets) else set()
        return cls(rank, frozenset(names), tuple(runs or [_EVERY] * bool(targets)), *counts or [None])

    @classmethod
    def of(cls, model: ModelDescription) -> Trained | None:
        """From a training's description; None where all trains.

        Raises:
            ValueError: as ``read``.
        """
        found = cls.read(model.trained, model.num_layers)
        if found and model.tied and not found.names.isdisjoint((EMBEDDING, OUTPUT)):  # one matrix
            found = replace(found, names=found.names | {EMBEDDING, OUTPUT})
        return found and found.on(model.num_layers)

    def on(self, count: int) -> Trained:
        """The same of a model of that many layers."""
        trains = [any(first <= layer <= last for first, last in self.runs) for layer in range(count)]
        # Before the first that trains nothing needs a gradient; where none does, only what trains before all of them.
        first = 0 if EMBEDDING in self.names or not (any(trains) or self.names) else [*trains, True].index(True)
        return replace(self, layers=tuple(_TRAINS if one else _PASSED * (at >= first) for at, one in enumerate(trains)))

    def stages(self, depth: int) -> Iterator[tuple[float, float]]:
        """Shares of B and W of every stage that run, of as many layers on each; adapters' W is none.

        Raises:
            ValueError: layers are named, and not of how many.
        """
        if self.count is None and any(run != _EVERY for run in self.runs):
            raise ValueError("--trained: say of how many layers, such as layers=16-31/32")
        count = self.count or 1
        parts = [layer for layer in self.on(count).layers for _ in range(depth)]
        for stage in range(depth):
            own = replace(self, layers=tuple(parts[stage * count : (stage + 1) * count]))
            yield own.backward, own.whole

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
