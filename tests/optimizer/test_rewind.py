"""Forwards that run again find everything as the first time: data, random states, buffers."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.pipeline.runtime.rewind import Rewind


class Counting(torch.nn.Module):
    """Counts its forwards in a buffer, as an expert router counts tokens, and draws from two random streams."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, items: list[int]) -> tuple[float, list[int], float, bytes]:
        self.count += 1
        tracker = get_cuda_rng_tracker()
        before = bytes(tracker.states_["stream"].tolist())
        tracker.states_["stream"] = torch.tensor([before[0] + 1], dtype=torch.uint8)
        return float(self.count), items, float(torch.rand(())), before


def test_what_runs_again_sees_the_same() -> None:
    chunks = [Counting(), Counting()]
    shared = iter(range(10))
    get_cuda_rng_tracker().states_["stream"] = torch.tensor([7], dtype=torch.uint8)
    rewind = Rewind(chunks, [shared, shared])
    first, second = rewind.iterators
    assert first is second, "chunks that shared a stream still do"
    assert first is not None

    def run() -> list[tuple[float, list[int], float, bytes]]:
        return [chunk([next(first), next(first)]) for chunk in chunks]

    try:
        in_vain = run()
        rewind.rewind()
        rewind.forget()
        assert run() == in_vain
        assert next(first) == 4, "and then goes on"
    finally:
        del get_cuda_rng_tracker().states_["stream"]
