"""A small model with whatever autograd can save, trained with its activations in host memory, and memory that is poisoned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.pipeline.backward.linear import WeightGradient
from megatron.pipeline.backward.weight_tasks import WeightTask, deferring, prepare, submit
from megatron.pipeline.distributed.sequence import Part
from megatron.pipeline.runtime.offload.activations import Store
from megatron.pipeline.runtime.offload.copy_streams import CopyStreams, Pairs, ThreadCopyStreams, Ticket
from megatron.pipeline.runtime.offload.host_memory import Arena, HostPool

WIDTH, HEADS, TOKENS, BATCH = 32, 4, 16, 2


class Split(torch.autograd.Function):
    """A linear whose weight gradient is a task."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.weight = weight
        return input @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        input, weight = ctx.saved_tensors
        submit(WeightGradient(ctx.weight, Part(input), Part(gradient)))
        return gradient @ weight, None


class Layer(torch.nn.Module):
    """Attention and MLP, with whatever autograd can save: views, expanded and transposed ones, outputs, one tensor twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.up = torch.nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / 8)
        self.down = torch.nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / 8)
        self.scale = torch.nn.Parameter(torch.randn(WIDTH))
        prepare(self.up)
        prepare(self.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 1, 3, 0, 4)
        query, key, value = heads.unbind(0)  # views of one storage
        probabilities = torch.softmax(query @ key.transpose(-1, -2), dim=-1)  # a saved output
        attended = (probabilities @ value).permute(2, 0, 1, 3).reshape(x.shape)
        x = x + attended * self.scale.expand_as(attended)
        inner = torch.relu_(Split.apply(functional.gelu(Split.apply(self.norm(x), self.up)), self.down))  # in place
        inner = inner * inner * x[:1].expand_as(x)  # twice the same, and an expanded one
        return x + checkpoint(lambda one: torch.tanh(one).sin(), inner, use_reentrant=self.reentrant)


def stores(model: torch.nn.Module, streams: CopyStreams, pool: HostPool, smallest: int = 64) -> Callable[[], Store]:
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return lambda: Store(streams, pool, parameters, smallest)


def train(
    model: torch.nn.Module, make: Callable[[], Store] | None, tokens: tuple[int, ...] = (TOKENS,) * 3, full: bool = False
) -> list[torch.Tensor]:
    """One iteration with a microbatch of each length, whose activations all leave before the first comes back.

    Args:
        make: its stores; None to offload nothing.
        full: activations are recomputed, and the inputs alone are kept.

    Returns:
        The gradients of all inputs, then of the parameters.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    inputs, losses = [], []
    away: list[Store] = []
    for count in tokens:
        x = torch.randn(count, BATCH, WIDTH, generator=generator).to(device).requires_grad_()
        store = make() if make else None
        if store:
            store.adopt([x, None])
        with torch.no_grad() if full else store.capture() if store else nullcontext():
            losses.append(model(x).square().mean())
        if store:
            store.start_offload()
            if away:
                away[-1].finish_offload()
            away.append(store)
        inputs.append(x)
    if away:
        away[-1].finish_offload()
        assert all(x.untyped_storage().nbytes() == 4 for x in inputs)
        away[0].start_reload()
    for number, x in enumerate(inputs):
        if away:
            for following in away[number + 1 : number + 2]:
                following.start_reload()
            away[number].finish_reload()
        loss = model(x).square().mean() if full else losses[number]
        tasks: list[WeightTask] = []
        with deferring(tasks):
            loss.backward()
        with torch.no_grad():
            for task in tasks:
                task.run()
    gradients = [x.grad for x in inputs] + [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [gradient for gradient in gradients if gradient is not None]


def move(store: Store) -> None:
    store.start_offload()
    store.finish_offload()
    store.start_reload()
    store.finish_reload()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


class Poisoning(ThreadCopyStreams):
    """Whatever is freed on the device reads as NaN from then on."""

    def to_host(self, pairs: Pairs) -> Ticket:
        return Poisoned(super().to_host(pairs), [source for source, _ in pairs])


class Poisoned:
    def __init__(self, ticket: Ticket, sources: list[torch.Tensor]) -> None:
        self._ticket = ticket
        self._sources = sources

    def wait(self) -> None:
        self._ticket.wait()
        for source in self._sources:
            source.fill_(255)
        self._sources.clear()

    @property
    def times(self) -> tuple[Any, Any]:
        return self._ticket.times


class PoisonedPool(HostPool):
    def take(self, nbytes: int) -> Arena:
        arena = super().take(nbytes)
        arena.bytes.fill_(255)
        return arena

    def give(self, arena: Arena) -> None:
        arena.bytes.fill_(255)
        super().give(arena)


class Unawaited:
    def __init__(self, ticket: Ticket) -> None:
        self.times = (0.0, 0.0)

    def wait(self) -> None:
        """At once."""
