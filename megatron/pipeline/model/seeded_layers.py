"""Parts of layers that draw random numbers of their own: experts by their rank, layers for further tokens by their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.pipeline.patches import compat

from megatron.pipeline.model import seeding


class _ByExpertRank:
    """Local experts that differ between expert-parallel ranks also when they are drawn on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _numbers_of_this_expert_rank():
            super().__init__(*args, **kwargs)


class SeededExperts(_ByExpertRank, SequentialMLP):
    """Local experts, one after another."""


# Local experts in one grouped product, by upstream's class; empty for releases that have none.
GROUPED_EXPERTS = {
    upstream: type("SeededGroupedExperts", (_ByExpertRank, upstream), {})
    for upstream in [compat.optional("megatron.core.transformer.moe.experts", "GroupedMLP")]
    if upstream is not None
}


class SeededPredictionLayer(MultiTokenPredictionLayer):
    """A layer of multi-token prediction whose weights and dropout masks are drawn from its number."""

    def __init__(self, config: Any, submodules: Any, layer_number: int = 1, *, seed: int, **kwargs: Any) -> None:
        seeding.seed_layer(seeding.derive(seeding.weight_base(seed), "prediction"), layer_number)
        super().__init__(config, submodules, layer_number, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seeding.seed_masks(self, self.layer_number, "prediction")
        return super().forward(*args, **kwargs)


@contextmanager
def _numbers_of_this_expert_rank() -> Iterator[None]:
    """Make random numbers that are drawn on the CPU within, and no later ones, depend on the expert-parallel rank."""
    state = torch.get_rng_state()
    torch.manual_seed(seeding.derive(torch.initial_seed(), "experts", parallel_state.get_expert_model_parallel_rank()))
    try:
        yield
    finally:
        torch.set_rng_state(state)
