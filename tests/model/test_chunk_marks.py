"""A chunk's weights, saved under one placement and loaded under another."""

from __future__ import annotations

import io

import pytest
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.pipeline.model.chunk_marks import mark


class Layer(TransformerLayer):
    """Of it its number matters alone."""

    def __init__(self, number: int) -> None:
        torch.nn.Module.__init__(self)
        self.layer_number, self.weight = number, torch.nn.Parameter(torch.full((2,), float(number)))


def chunk(*numbers: int, marked: bool = True) -> torch.nn.Module:
    layers = torch.nn.Sequential(*map(Layer, numbers))
    if marked:
        mark(layers)
    return layers


def test_other_layers_are_refused_and_what_says_nothing_is_taken() -> None:
    file = io.BytesIO()
    torch.save({"model1": chunk(7, 8).state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)["model1"]
    chunk(7, 8).load_state_dict(saved)
    chunk(5, 6, marked=False).load_state_dict(saved)
    for strict in (True, False):
        with pytest.raises(
            ValueError, match=r"layers \[7, 8\], and this chunk has \[5, 6\]: load them under the schedule that saved"
        ):
            chunk(5, 6).load_state_dict(saved, strict=strict)
    for unknown in (dict(saved), chunk(5, 6, marked=False).state_dict()):
        chunk(7, 8).load_state_dict(unknown)
