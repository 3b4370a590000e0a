"""Transformer Engine's own linears, of every release that scripts/fetch_transformer_engine.py has fetched, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import gpt
from engine.linears import HIDDEN, INNER, METERED, OFFLOADED, ORDERS, PLAIN, RECIPES, RECOMPUTED, TOKENS, counted_bytes, gradients
from engine.releases import fetched, ranks_with
from marked import whole
from pool import Pool
from runtime.shielded import costs

from megatron.pipeline.planner.costmodel.activations import layer_retained
from megatron.pipeline.planner.shape.activation_policy import ActivationPolicy
from megatron.pipeline.planner.shape.gpt import Shape

_SKIP = pytest.mark.skip(
    reason="build/ has no release of Transformer Engine: python scripts/fetch_transformer_engine.py fetches some"
)
_FETCHED = fetched()
_RELEASES: Sequence[Any] = [
    *(release if release in (_FETCHED[0], _FETCHED[-1]) else whole(release, id=release) for release in _FETCHED),
    *([] if _FETCHED else [pytest.param("", marks=_SKIP, id="none")]),
]

_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.fixture(scope="module", params=_RELEASES)
def engine(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Ranks with a release of Transformer Engine."""
    ranks = ranks_with(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("saving", [PLAIN, METERED, OFFLOADED, RECOMPUTED])
@pytest.mark.parametrize(("bias", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=["fp32", "bias bf16"])
def test_equals_a_backward_that_delays_nothing(engine: Pool, bias: bool, dtype: torch.dtype, saving: str) -> None:
    expected = engine.run(2, gradients, None, bias, dtype)
    for order in ORDERS:
        assert engine.run(2, gradients, order, bias, dtype, saving) == expected, order


_WEIGHTS = "weights in FP8"


@pytest.mark.parametrize("saving", [PLAIN, RECOMPUTED, _WEIGHTS])
@pytest.mark.parametrize("recipe", RECIPES)
def test_in_fp8_equals_a_backward_that_delays_nothing(engine: Pool, recipe: str, saving: str) -> None:
    given = (False, torch.bfloat16, RECOMPUTED if saving == RECOMPUTED else PLAIN, recipe, saving == _WEIGHTS)
    expected = engine.run(2, gradients, None, *given)
    if saving == PLAIN:
        assert expected != engine.run(2, gradients, None, False, torch.bfloat16)
    for order in ORDERS if saving == PLAIN else ORDERS[1:2]:
        assert engine.run(2, gradients, order, *given) == expected, order


def test_counts_what_the_stores_keep_from_b_to_w(engine: Pool) -> None:
    """Of each linear its input and the gradient of its output, in bfloat16, and nothing of a weight's size."""
    [(forward, between, after)] = engine.run(1, counted_bytes)
    inputs, outputs = HIDDEN + INNER + HIDDEN + HIDDEN, INNER + HIDDEN + HIDDEN + HIDDEN
    assert forward > 0 and after == 0
    assert between == 2 * TOKENS * (inputs + outputs)


_TRAININGS = {
    "bf16": (2, 1, "--bf16"),
    "recomputed": (2, 1, f"--swiglu --normalization RMSNorm --disable-bias-linear {_RECOMPUTED}"),
    "distributed optimizer": (4, 1, "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "sequence parallel": (4, 2, "--bf16 --sequence-parallel"),
    "experts": (4, 1, "--bf16 --num-experts 4 --expert-model-parallel-size 2 --moe-grouped-gemm --disable-bias-linear"),
}


def test_weight_gradients_behind_collectives_change_no_bit(engine: Pool, tmp_path: Path) -> None:
    ranks, tensor, flags = _TRAININGS["sequence parallel"]
    expected = engine.run(ranks, gpt.train, "stock", flags, tensor)
    assert engine.run(ranks, gpt.train, "zb-h1", f"{flags} {costs(tmp_path, 2)}", tensor) == expected


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_w_keeps_what_the_formula_says_under_sequence_parallelism(engine: Pool, tensor: int) -> None:
    policy = ActivationPolicy(tensor=tensor, sequence_parallel=tensor > 1)
    expected = 4 * layer_retained(replace(Shape.plain(4, 32, 4, 16, 64, microbatch=2), policy=policy))
    for found in engine.run(tensor, gpt.bytes_kept_by_w, tensor):
        assert list(found) == [pytest.approx(expected, rel=0.05)]


@pytest.mark.parametrize("training", _TRAININGS)
def test_a_gpt_trains_as_under_megatron_cores_schedule(engine: Pool, training: str) -> None:
    ranks, tensor, flags = _TRAININGS[training]
    expected = engine.run(ranks, gpt.train, "stock", flags, tensor)
    (loss, _), *_ = expected[-1][0]
    assert loss is not None
    assert engine.run(ranks, gpt.train, "zb-h1", flags, tensor) == expected


_IN_SHARDS = (
    "--bf16 --use-distributed-optimizer --accumulate-allreduce-grads-in-fp32 --hidden-size 128 --ffn-hidden-size 128 "
    "--seq-length 64 --disable-bias-linear --untie-embeddings-and-output-weights --clip-grad 0"
)
_OVERLAPS = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"


# megatron-core's recipe of delayed scaling is a dataclass of pydantic, where Transformer Engine's own is.
_NO_PYDANTIC = pytest.mark.skipif(find_spec("pydantic") is None, reason="needs pydantic: pip install pydantic")
_OF_CONFIGURATIONS = [pytest.param(one, marks=_NO_PYDANTIC) if one == "delayed" else one for one in RECIPES]


def _gathered(recipe: str) -> gpt.Weights:
    return gpt.Weights(recipe, reused=recipe == "mxfp8")


def _whole(ranks: list[Any]) -> tuple[list[list[float]], dict[str, str]]:
    """Losses of every replica, and digests of the weights of all ranks, which have the same of the same weight."""
    losses = [[loss for loss, _ in steps] for steps, _ in ranks if steps[0][0] is not None]
    weights: dict[str, str] = {}
    for _, own in ranks:
        weights = own | weights
        assert own.items() <= weights.items()
    return losses, weights


@pytest.mark.parametrize("recipe", _OF_CONFIGURATIONS)
def test_weights_that_are_gathered_in_fp8_are_what_forwards_round_others_to(engine: Pool, recipe: str) -> None:
    gathered, others = (
        engine.run(2, gpt.train, "stock", _IN_SHARDS, 1, 1, weights)[0]
        for weights in (_gathered(recipe), gpt.Weights(recipe, False))
    )
    assert gathered[0][-1][0] == others[0][-1][0]
    differ = {name for name, digest in gathered[1].items() if others[1][name] != digest}
    assert differ and all(name.startswith("forward's ") for name in differ)


@pytest.mark.parametrize("recipe", _OF_CONFIGURATIONS)
def test_weights_that_are_gathered_in_fp8_train_as_under_megatron_cores_schedule(engine: Pool, recipe: str) -> None:
    weights = _gathered(recipe)
    losses, expected = _whole(engine.run(4, gpt.train, "stock", _IN_SHARDS, 1, 2, weights))
    assert _whole(engine.run(4, gpt.train, "zb-v", _IN_SHARDS, 1, 2, weights)) == (losses, expected)
    later, overlapped = _whole(engine.run(4, gpt.train, "zb-h1", f"{_IN_SHARDS} {_OVERLAPS}", 1, 2, weights))
    assert later == losses and overlapped and overlapped.items() <= expected.items()


def test_memory_of_gradients_has_gathered_weights_until_forwards_take_them(engine: Pool) -> None:
    flags, weights = f"{_IN_SHARDS} {_OVERLAPS} --num-layers 8", _gathered("mxfp8")
    expected, ours = (_whole(engine.run(4, gpt.train, schedule, flags, 1, 4, weights)) for schedule in ("stock", "zb-v"))
    assert ours == expected


def test_experts_that_are_gathered_in_fp8_train_as_under_megatron_cores_schedule(engine: Pool) -> None:
    flags = f"{_IN_SHARDS} {_OVERLAPS} --num-experts 4 --expert-model-parallel-size 2 --moe-grouped-gemm"
    expected, ours = (engine.run(4, gpt.train, schedule, flags, 1, 2, _gathered("tensorwise")) for schedule in ("stock", "zb-h1"))
    assert [_whole([one]) for one in ours] == [_whole([one]) for one in expected]  # ranks have other experts by the same names


@pytest.mark.parametrize("recipe", _OF_CONFIGURATIONS)
def test_a_profile_in_fp8_times_passes_and_takes_bytes_from_the_formulas(engine: Pool, recipe: str) -> None:
    for profile, sizes in engine.run(2, gpt.profile, _IN_SHARDS, _gathered(recipe)):
        assert profile.unit == "bytes"
        for stage, formula in zip(profile.stages, sizes.stages, strict=True):
            assert [stage.activation, stage.retained] == [formula.activation, formula.retained] != [0, 0]
            assert min(stage.forward, stage.backward, stage.weight) > 0 and stage.forward != formula.forward
