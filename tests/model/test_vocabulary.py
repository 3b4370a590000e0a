"""The vocabulary in shards, all in one process: losses and gradients are the dense layer's, whatever the settings."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from pool import Pool

from megatron.pipeline.model.vocabulary import output
from megatron.pipeline.model.vocabulary.input import EmbeddingShard
from megatron.pipeline.model.vocabulary.loss import LossSettings, Statistics, weigh
from megatron.pipeline.model.vocabulary.output import OutputShard
from megatron.pipeline.planner.shape.shards import Shards

HIDDEN = 12


@dataclass
class Case:
    """One microbatch and the weights of an output layer, and what is to be made of them."""

    size: int = 45
    stock_rows: int = 50
    count: int = 4
    mask_padding: bool = False
    batch: int = 2
    sequence: int = 5
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    limit: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    scale: float = 1.0  # of the loss, as in fp16
    confidence: float = 0.0  # how far hidden states point to their labels

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.size + 7 * self.count)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.shards = Shards.of(self.size, self.stock_rows, self.count, self.mask_padding)
        self.loss = LossSettings(self.label_smoothing, self.z_loss)
        weight, hidden = draw(self.stock_rows, HIDDEN), draw(self.sequence, self.batch, HIDDEN)
        labels = torch.randint(0, self.size, (self.batch, self.sequence), generator=generator)
        hidden += self.confidence * weight[labels.t()]
        self.weight, self.hidden = weight.to(self.device, self.dtype), hidden.to(self.device, self.dtype)
        self.labels = labels.to(self.device)
        mask = torch.randint(0, 2, (self.batch, self.sequence), generator=generator)
        self.weights = (self.scale * mask * draw(self.batch, self.sequence).abs()).to(self.device)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Losses [b, s], gradients by the hidden states and the weights, in float64 from the same 16-bit or float32 values."""
        weight, hidden = self.weight.double().requires_grad_(), self.hidden.double().requires_grad_()
        logits = (hidden @ weight[: self.shards.total_counted].t()).transpose(0, 1)
        log_p = logits.log_softmax(-1)
        losses = -log_p.gather(-1, self.labels[..., None])[..., 0]
        if self.label_smoothing:
            count = logits.size(-1)
            share = self.label_smoothing * count / (count - 1)
            losses = (1 - share) * losses - share * log_p.mean(-1)
        losses = losses + self.z_loss * logits.logsumexp(-1).square()
        (losses * self.weights).sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        return losses.detach(), hidden.grad, weight.grad

    def stock(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same by megatron-core's cross entropy and autograd, in a world of one rank that exists."""
        weight, hidden = self.weight.clone().requires_grad_(), self.hidden.clone().requires_grad_()
        losses = vocab_parallel_cross_entropy(hidden @ weight.t(), self.labels.t().contiguous(), self.label_smoothing).t()
        (losses * self.weights).sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        return losses.detach(), hidden.grad, weight.grad

    def parameter(self, index: int) -> torch.nn.Parameter:
        """The weight of a shard, with a ``main_grad``."""
        rows = self.shards.own(index)
        weight = self.weight.new_zeros(self.shards.rows, HIDDEN)
        weight[: self.shards.stored(index)] = self.weight[rows.start : rows.stop]
        parameter: Any = torch.nn.Parameter(weight)
        parameter.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        assert isinstance(parameter, torch.nn.Parameter)
        return parameter

    def layers(self) -> list[OutputShard]:
        layers = []
        for index in range(self.count):
            layer = OutputShard(self.parameter(index), self.shards, index, self.loss, logits_limit=self.limit)
            layer.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
            layers.append(layer)
        return layers

    def sharded(self, one_barrier: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layers = self.layers()
        parts = [layer(self.hidden, self.labels, one_barrier) for layer in layers]
        gathered = torch.stack([part.statistics for part in parts])
        statistics = Statistics(gathered, self.loss, (self.batch, self.sequence), self.shards.total_counted)
        if one_barrier:
            summed = torch.stack([part.input_gradient(statistics) for part in parts]).sum(0)
            gradient = weigh(summed, self.weights)
            assert all(part.backward(statistics, self.weights, False) is None for part in parts)
        else:
            gradient = torch.stack([part.backward(statistics, self.weights, True) for part in parts]).sum(0)
        weights: list[Any] = [layer.weight for layer in layers]
        main = torch.cat([weight.main_grad for weight in weights])
        assert not main[self.stock_rows :].any()
        return statistics.losses, gradient, main[: self.stock_rows]


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
        )
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
