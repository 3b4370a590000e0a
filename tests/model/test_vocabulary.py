"""The vocabulary in shards, all in one process: losses and gradients are the dense layer's, whatever the settings."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from model.vocabulary_case import HIDDEN, Case
from pool import Pool

from megatron.pipeline.model.vocabulary import output
from megatron.pipeline.model.vocabulary.input import EmbeddingShard
from megatron.pipeline.model.vocabulary.loss import LossSettings
from megatron.pipeline.planner.shape.shards import Shards


def check(case: Case, tolerance: float = 1e-5) -> None:
    expected = case.dense()
    for one_barrier in (False, True):
        for value, reference in zip(case.sharded(one_barrier), expected, strict=True):
            assert value.shape == reference.shape
            assert (value - reference).norm() <= tolerance * reference.norm() + 1e-6


def test_elementwise_work_on_a_gpu_has_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8192 tokens and 32768 rows beside a cache of 50 MiB, as an H100's: S ran 64 slices of it, of some five kernels each."""
    monkeypatch.setattr(output.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=50 * 2**20))
    output._rows_at_once.cache_clear()
    tokens = output._rows_at_once(32768, torch.device("cuda"))
    output._rows_at_once.cache_clear()
    assert 4 * tokens * 32768 <= 2 * 50 * 2**20 and -(-8192 // tokens) == 11


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"count": 1},
        {"mask_padding": True},
        {"size": 20, "stock_rows": 24, "count": 5},  # two shards without a row
        {"size": 17, "stock_rows": 40, "count": 5, "mask_padding": True},  # two shards with masked rows only
        {"z_loss": 1e-2},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.1, "z_loss": 1e-2, "mask_padding": True, "limit": 1},
        {"limit": 4 * 16 * 3},
        {"scale": 2.0**16},
    ],
    ids=str,
)
def test_is_the_dense_layer(options: dict[str, Any]) -> None:
    check(Case(**options))


@given(data=st.data())
@examples(40)
def test_any_size(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 150))
    check(
        Case(
            size=size,
            stock_rows=size + data.draw(st.integers(0, 50)),
            count=data.draw(st.integers(1, 9)),
            mask_padding=data.draw(st.booleans()),
            batch=data.draw(st.integers(1, 3)),
            sequence=data.draw(st.integers(1, 6)),
            label_smoothing=data.draw(st.sampled_from([0.0, 0.2])),
            z_loss=data.draw(st.sampled_from([0.0, 1e-3])),
            limit=data.draw(st.sampled_from([None, 1, 700, 10**6])),
        ),
    )


def errors_of_stock_and_ours(devices: list[str]) -> list[tuple[str, list[float], list[float], list[float]]]:
    """For several cases, how far losses and gradients are from exact ones: by stock, with two barriers, with one."""
    parallel_state.initialize_model_parallel()
    found = []
    cases: list[dict[str, Any]] = [
        {"label_smoothing": 0.1},
        {"size": 50, "confidence": 1.0},
        {"size": 3000, "stock_rows": 3072, "confidence": 2.0},
    ]
    for device, dtype, options in product(devices, (torch.float32, torch.bfloat16, torch.float16), cases):
        case = Case(dtype=dtype, device=device, scale=2.0**8 if dtype == torch.float16 else 1.0, **options)
        exact = case.dense()
        errors = [
            [((value - reference).norm() / reference.norm()).item() for value, reference in zip(values, exact, strict=True)]
            for values in (case.stock(), case.sharded(False), case.sharded(True))
        ]
        found.append((str(case), errors[0], errors[1], errors[2]))
    return found


def check_errors(found: list[tuple[str, list[float], list[float], list[float]]]) -> None:
    for case, stock, *ours in found:
        for errors in ours:
            for error, reference in zip(errors, stock, strict=True):
                assert error <= 1.7 * reference + 1e-6, (case, stock, ours)


def test_is_as_exact_as_stock(pool: Pool) -> None:
    check_errors(pool.run(1, errors_of_stock_and_ours, ["cpu"])[0])


@pytest.mark.cuda
def test_is_as_exact_as_stock_on_a_gpu(nccl: Pool) -> None:
    check_errors(nccl.run(1, errors_of_stock_and_ours, ["cuda"])[0])


def embedded(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of all shards' IF and its gradient of the weight, ours and by torch."""
    case = Case(device=device, dtype=dtype)
    tokens, gradient = case.labels, case.hidden.transpose(0, 1)
    weight = case.weight.clone().requires_grad_()
    torch.nn.functional.embedding(tokens, weight).backward(gradient)
    layers = []
    for index in range(case.count):
        layer = EmbeddingShard(case.parameter(index), case.shards, index)
        layer.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
        layer.backward(tokens, gradient)
        layers.append(layer)
    weights: list[Any] = [layer.weight for layer in layers]
    main = torch.cat([one.main_grad for one in weights])[: case.stock_rows]
    assert weight.grad is not None
    return torch.stack([layer(tokens) for layer in layers]).sum(0), case.weight[tokens], main, weight.grad


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_and_their_gradient(device: str, dtype: torch.dtype) -> None:
    output, expected, gradient, reference = embedded(device, dtype)
    assert torch.equal(output, expected)
    torch.testing.assert_close(gradient, reference.float(), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_a_limit_keeps_nothing_as_large_as_the_vocabulary() -> None:
    tokens, hidden = 10, 10 * HIDDEN
    for limit, logits in ((None, tokens * 16), (4 * 16 * tokens, tokens * 16), (4 * 16 * tokens - 1, 0)):
        case = Case(limit=limit)
        for with_gradient in (False, True):
            held = case.layers()[0](case.hidden, case.labels, with_gradient).held
            floats = sum(tensor.numel() for tensor in held if tensor.is_floating_point())
            assert floats == hidden * (2 if with_gradient else 1) + logits


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 0 and less than 1"):
        LossSettings(label_smoothing=1.0)
    with pytest.raises(ValueError, match="0 or more"):
        LossSettings(z_loss=-1.0)
    with pytest.raises(ValueError, match="60 tokens in 50 rows"):
        Shards.of(60, 50, 2)
    with pytest.raises(ValueError, match="at least one"):
        Shards.of(40, 50, 0)
