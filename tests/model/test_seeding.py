"""Random streams that are pointed at the numbers of a layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from megatron.pipeline.model import seeding


def test_streams_that_are_generators_stay_generators() -> None:
    """Transformer Engine's and megatron-core's are, where CUDA graphs may be captured: ``--te-rng-tracker``."""
    states: list[dict[str, Any]] = [{seeding._TENSOR_PARALLEL: kind} for kind in (torch.Generator(), torch.get_rng_state())]
    streams = []
    for state in states:
        ranks = MagicMock(**{f"{name}.return_value": 0 for name in dir(seeding.parallel_state) if name.startswith("get_")})
        tracker = SimpleNamespace(states_=state)
        with patch.object(seeding, "parallel_state", ranks), patch.object(seeding, "get_cuda_rng_tracker", lambda: tracker):  # noqa: B023
            seeding.seed_layer(5, 1)
            first = state[seeding._TENSOR_PARALLEL]
            seeding.seed_layer(5, 2)
        assert first is not state[seeding._TENSOR_PARALLEL], "what is put back later is as it was"
        streams.append(first if isinstance(first, torch.Generator) else torch.Generator().set_state(first))
    assert isinstance(states[0][seeding._TENSOR_PARALLEL], torch.Generator)
    assert torch.equal(*(torch.rand(3, generator=stream) for stream in streams))
