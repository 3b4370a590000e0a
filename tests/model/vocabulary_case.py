"""One microbatch at the output layer, dense and in shards that are all in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

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
