"""Sliding windows of attention: how many keys a query reads in every layer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pipeline.planner.shape.description import ModelDescription

BLOCK = 128  # keys that a kernel takes at once: of a block at an edge of the window it computes all


@dataclass(frozen=True)
class Windows:
    """Keys of a query in every layer, those that a mask hides within a block or, without a window, anywhere included."""

    layers: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelDescription) -> Windows | None:
        """From a training's description; None where every layer reads all keys."""
        window, every = model.window_size, model.window_attn_skip_freq
        if window is None or window[0] < 0:
            return None
        keys = min(model.seq_length, window[0] + max(0, window[1]) + 1 + BLOCK)
        narrow = every if isinstance(every, list) else [every is None or (layer + 1) % every for layer in range(model.num_layers)]
        return cls(tuple(keys if one else model.seq_length for one in narrow))

    @property
    def mean(self) -> float:
        return sum(self.layers) / len(self.layers)
