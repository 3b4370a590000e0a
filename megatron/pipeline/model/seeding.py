"""Random numbers that depend on what is computed, not on where or when.

Initial weights are drawn from (seed, global layer number), dropout masks from (seed, iteration, microbatch, data-parallel
rank, global layer number). Every placement, pipeline size and order of passes so starts from and sees the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import compat
from megatron.pipeline.patches.language_module import mark_boundary_weights

EMBEDDING = 0  # transformer layers count from 1, as megatron-core numbers them

# The identity of the running microbatch lives among the tracker's states: activation recomputation saves and restores
# those, so a recomputed layer draws the masks it drew the first time, whichever microbatch runs by then.
_MICROBATCH = "megatron-pipeline-microbatch"

_RANDOM = "megatron.core.tensor_parallel.random"
_TENSOR_PARALLEL = compat.get(_RANDOM, "_MODEL_PARALLEL_RNG_TRACKER_NAME")
_DATA_PARALLEL = compat.get(_RANDOM, "get_data_parallel_rng_tracker_name")()
_EXPERT_PARALLEL = compat.get(_RANDOM, "get_expert_parallel_rng_tracker_name")()


def output_layer(config: Any) -> int:
    """The number of the output layer, after the transformer's and those for multi-token prediction."""
    return int(config.num_layers + 1 + (config.mtp_num_layers or 0))


def seed_layer(base: int, layer: int, tensor_rank: int | None = None) -> None:
    """Point every random stream at the start of one layer's numbers.

    Args:
        base: identifies the purpose, from ``derive``.
        layer: global layer number from 1, ``EMBEDDING``, or ``output_layer``.
        tensor_rank: whose numbers the tensor-parallel stream is to give; this rank's if not said.
    """
    own = parallel_state.get_tensor_model_parallel_rank()
    ranks = {
        _TENSOR_PARALLEL: own if tensor_rank is None else tensor_rank,
        _DATA_PARALLEL: 0,
        _EXPERT_PARALLEL: (
            1000 * parallel_state.get_expert_model_parallel_rank() + parallel_state.get_expert_tensor_parallel_rank()
        ),
    }
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu")
    tracker = get_cuda_rng_tracker()
    for name, rank in ranks.items():
        if name in tracker.states_:
            generator.manual_seed(derive(base, layer, name, rank))
            as_bytes = torch.is_tensor(tracker.states_[name])  # else a generator: Transformer Engine's, for CUDA graphs
            tracker.states_[name] = generator.get_state() if as_bytes else generator.clone_state()
    seed = derive(base, layer)
    # torch.manual_seed looks for devices of every kind, each time.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Leave every random stream where it was, after draws within."""
    tracker = get_cuda_rng_tracker()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    states = tracker.get_states()
    with torch.random.fork_rng(devices=devices):
        yield
    tracker.set_states(states)


def derive(*identity: int | str) -> int:
    """A 64-bit seed that is a well-mixed function of its arguments, the same on every rank and in every process."""
    text = "/".join(map(str, identity)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def set_iteration(chunks: Sequence[torch.nn.Module], iteration: int) -> None:
    """Set the iteration of the model's next forwards."""
    for chunk in unwrap_model(list(chunks)):
        chunk.iteration = iteration


class SeededGPTModel(GPTModel):
    """GPTModel that announces the identity of a microbatch before its layers draw dropout masks."""

    iteration = 0
    current_microbatch = 0  # see patches/schedules.py

    def __init__(self, *args: Any, seed: int, **kwargs: Any) -> None:
        seed_layer(weight_base(seed), EMBEDDING)
        super().__init__(*args, **kwargs)
        self.seed = seed

    def setup_embeddings_and_output_layer(self) -> None:
        mark_boundary_weights(self)

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:  # the first part of a forward, and of a layer plan
        if self.training and _uses_dropout(self.config):
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            base = derive(self.seed, "dropout", self.iteration, self.current_microbatch, replica)
            get_cuda_rng_tracker().states_[_MICROBATCH] = base
            seed_layer(base, EMBEDDING)
        return super()._preprocess(*args, **kwargs)


class SeededTransformerLayer(TransformerLayer):
    """TransformerLayer whose weights and dropout masks are drawn from its global layer number."""

    def __init__(self, config: Any, submodules: Any, layer_number: int = 1, *, seed: int, **kwargs: Any) -> None:
        # Layers for further tokens come after all others; from 0.17 on they count from 1 themselves.
        counts_alone = kwargs.get("is_mtp_layer", False)
        offset = config.num_layers if counts_alone else get_transformer_layer_offset(config, kwargs.get("vp_stage"))
        self._seeded_number = layer_number + offset
        seed_layer(weight_base(seed), self._seeded_number)
        super().__init__(config, submodules, layer_number, **kwargs)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:  # the first part of a forward, and of a layer plan
        seed_masks(self, self._seeded_number)
        return super()._forward_attention(*args, **kwargs)


def seed_masks(layer: Any, number: int, *purpose: str) -> None:
    """Point every random stream at the dropout masks of a layer, for the running microbatch; nothing without dropout."""
    if layer.training and _uses_dropout(layer.config):
        base = get_cuda_rng_tracker().states_[_MICROBATCH]
        seed_layer(derive(base, *purpose) if purpose else base, number)


def weight_base(seed: int) -> int:
    """The identity that initial weights are derived from."""
    return derive(seed, "weights")


def _uses_dropout(config: Any) -> bool:
    return config.hidden_dropout > 0 or config.attention_dropout > 0
