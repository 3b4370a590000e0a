"""Activations that go to host memory and come back: backward finds the same numbers, or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime.conftest import Observing
from runtime.offloaded import TOKENS, PoisonedPool, Poisoning, Unawaited, move, same, stores, train

from megatron.pipeline.runtime.offload import activations
from megatron.pipeline.runtime.offload.activations import Store
from megatron.pipeline.runtime.offload.copy_streams import ThreadCopyStreams, copy_streams_for
from megatron.pipeline.runtime.offload.host_memory import HostPool

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("full", [False, True])
def test_gradients_are_the_same_and_nothing_is_allocated_again(model: torch.nn.Sequential, device: str, full: bool) -> None:
    model.to(device)
    plain = train(model, None, full=full)
    streams, pool = copy_streams_for(torch.device(device)), HostPool(None, pinned=device == "cuda")
    make = stores(model, streams, pool)
    for _ in range(2):
        assert same(train(model, make, full=full), plain)
    streams.close()
    assert pool.in_use == 0
    assert pool.allocations == 3
    assert pool.most_in_use == pool.allocated


@pytest.mark.parametrize("bandwidths", [(2e7, 2e7), (2e6, 2e7), (2e7, 2e6)])
def test_slow_lanes_are_right_too(
    model: torch.nn.Sequential, bandwidths: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On memory that is poisoned whenever nobody may read it."""
    monkeypatch.setattr(activations, "_blank", lambda nbytes, _: torch.full((nbytes,), 255, dtype=torch.uint8))
    plain = train(model, None)
    streams = Poisoning(*bandwidths)
    assert same(train(model, stores(model, streams, PoisonedPool(None, pinned=False))), plain)
    streams.close()


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
def test_poison_is_noticed(model: torch.nn.Sequential, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wait does not wait."""
    monkeypatch.setattr(activations, "_blank", lambda nbytes, _: torch.full((nbytes,), 255, dtype=torch.uint8))
    plain = train(model, None, (TOKENS,))
    streams = Poisoning(1e6, 1e6)
    start = getattr(ThreadCopyStreams, direction)
    monkeypatch.setattr(ThreadCopyStreams, direction, lambda self, pairs: Unawaited(start(self, pairs)))
    assert not same(train(model, stores(model, streams, PoisonedPool(None, pinned=False)), (TOKENS,)), plain)
    streams.close()


def test_sizes_that_vary_are_allocated_once(model: torch.nn.Sequential, streams: ThreadCopyStreams) -> None:
    pool = HostPool(None, pinned=False)
    make = stores(model, streams, pool)
    lengths = [(16, 4, 8), (8, 16, 4), (4, 8, 16)]
    train(model, make, lengths[0])
    before = pool.allocations
    for one in lengths:
        assert same(train(model, make, one), train(model, None, one))
    assert pool.allocations == before


@pytest.mark.parametrize("when", ["before the copy", "during the copy", "never copied", "small"])
def test_a_change_in_place_is_an_error(streams: ThreadCopyStreams, when: str) -> None:
    store = Store(streams, HostPool(None, pinned=False), set(), 10**6 if when == "small" else 0)
    x = torch.randn(1000, requires_grad=True)
    with store.capture():
        y = x.exp()
    if when != "during the copy":
        y.add_(1)
    if when != "never copied":
        store.start_offload()
        if when == "during the copy":
            y.add_(1)
        store.finish_offload()
        store.start_reload()
        store.finish_reload()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_of_what_is_away_is_an_assertion(streams: ThreadCopyStreams) -> None:
    store = Store(streams, HostPool(None, pinned=False), set(), 0)
    x = torch.randn(1000, requires_grad=True)
    with store.capture():
        y = x.exp().sum()
    store.start_offload()
    store.finish_offload()
    with pytest.raises(AssertionError, match="away"):
        y.backward(retain_graph=True)
    store.start_reload()
    with pytest.raises(AssertionError, match="away"):
        y.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="on their way back"):
        store.start_offload()
    store.finish_reload()
    y.backward()


def test_what_stays_is_what_it_was(streams: ThreadCopyStreams, observing: Observing) -> None:
    """Sparse tensors, subclasses, complex conjugates, parameters."""
    meter = observing([])
    weight = torch.nn.Parameter(torch.randn(8, 8))
    saved: list[Any] = [
        weight,
        torch.eye(8).to_sparse(),
        torch.randn(8, 8).as_subclass(Subclass),
        torch.randn(8, 8, dtype=torch.complex64).conj(),
    ]
    store = Store(streams, HostPool(None, pinned=False), set(), 0)

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*saved)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            for before, after in zip(saved, ctx.saved_tensors, strict=True):
                assert torch.equal(before.to_dense(), after.to_dense())
            return gradient

    with store.capture():
        y = Save.apply(torch.randn(3, requires_grad=True))
    assert meter.current == 2 * 8 * 8 * 4 + 8 * 8 * 8
    move(store)
    assert store.bytes == 0
    assert store.copies == ()
    y.sum().backward()


class Subclass(torch.Tensor):
    pass


def test_what_is_discarded_and_made_again_stays(streams: ThreadCopyStreams) -> None:
    """As by megatron-core's CheckpointWithoutOutput: a storage is emptied once it is saved, and filled before its backward."""
    weight = torch.randn(64, 64, requires_grad=True)
    store = Store(streams, HostPool(None, pinned=False), frozenset(), smallest=1)
    with store.capture():
        hidden = torch.randn(64, 64) @ weight
        middle = torch.tanh(hidden)
        loss = (middle * middle.exp()).sum()
    kept, storage = middle.detach().clone(), middle.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    move(store)
    storage.resize_(size)
    storage.copy_(kept.untyped_storage())
    loss.backward()
    assert weight.grad is not None and weight.grad.isfinite().all()
    assert store.bytes
