"""What offloaded activations hold on the device and on the host, at every moment, and that nothing is left."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace

import pytest
import torch
from runtime.conftest import Observing
from runtime.offloaded import BATCH, TOKENS, WIDTH, move, stores

from megatron.pipeline.runtime.offload.activations import Store
from megatron.pipeline.runtime.offload.copy_streams import ThreadCopyStreams
from megatron.pipeline.runtime.offload.host_memory import HostPool, rounded


def test_what_is_counted_goes_and_comes_back(
    model: torch.nn.Sequential, streams: ThreadCopyStreams, request: pytest.FixtureRequest, observing: Observing
) -> None:
    meter = observing(model.parameters())
    x = torch.randn(TOKENS, BATCH, WIDTH, requires_grad=True)
    with meter.saving():
        graph = model(x).square().mean()
    plain = meter.current
    del graph
    assert meter.current == 0
    gc.disable()  # nothing waits for the garbage collector
    request.addfinalizer(gc.enable)
    store = stores(model, streams, HostPool(None, pinned=False))()
    store.adopt([x])
    with store.capture():
        loss = model(x).square().mean()
    assert meter.current == plain
    store.start_offload()
    assert meter.current == plain
    store.finish_offload()
    assert meter.current == plain - store.bytes < 0.02 * plain
    store.start_reload()
    assert meter.current == plain
    store.finish_reload()
    loss.backward()
    assert meter.current == x.untyped_storage().nbytes()
    del x, loss
    assert meter.current == 0
    assert meter.peak == plain
    (start, end), (back, done) = store.copies
    assert start <= end <= back <= done


def test_memory_goes_as_backward_frees_it(streams: ThreadCopyStreams, observing: Observing) -> None:
    meter = observing([])
    store = Store(streams, HostPool(None, pinned=False), set(), 0)
    x = torch.randn(1000, requires_grad=True)
    with store.capture():
        first = x.exp()
        second = first.exp()
    move(store)
    assert meter.current == 2 * 4000
    gradient = torch.autograd.grad(second, first, torch.ones(1000))[0]  # the graph of one of the two
    assert meter.current == 4000
    assert torch.equal(gradient, second)


def test_what_forward_drops_does_not_travel(streams: ThreadCopyStreams) -> None:
    store = Store(streams, HostPool(None, pinned=False), set(), 0)
    x = torch.randn(1000, requires_grad=True)
    with store.capture():
        kept = x.exp()
        x.sin().cos()
    move(store)
    assert store.bytes == 4000
    assert torch.equal(torch.autograd.grad(kept.sum(), x)[0], kept)


@pytest.mark.parametrize("moment", range(5))
def test_an_iteration_is_given_up_at_any_moment(model: torch.nn.Sequential, moment: int, observing: Observing) -> None:
    streams, pool = ThreadCopyStreams(2e7, 2e7), HostPool(None, pinned=False)
    meter = observing(model.parameters())
    store = stores(model, streams, pool)()
    x = torch.randn(TOKENS, BATCH, WIDTH, requires_grad=True)
    store.adopt([x])
    with store.capture():
        loss = model(x).square().mean()
    for step in [store.start_offload, store.finish_offload, store.start_reload, store.finish_reload][:moment]:
        step()
    store.abandon()
    now = time.time()
    assert all(end <= now for _, end in store.copies)  # it has waited
    store.abandon()
    del loss, x
    assert meter.current == 0
    assert pool.in_use == 0
    streams.close()


def test_graphs_may_die_without_a_backward(model: torch.nn.Sequential, streams: ThreadCopyStreams, observing: Observing) -> None:
    meter, pool = observing(model.parameters()), HostPool(None, pinned=False)
    for before in range(5):
        store = stores(model, streams, pool)()
        with store.capture():
            graph = [model(torch.randn(TOKENS, BATCH, WIDTH)).square().mean()]
        for number, step in enumerate([store.start_offload, store.finish_offload, store.start_reload, store.finish_reload]):
            if number == before:
                graph.clear()
            step()
        graph.clear()
        assert meter.current == 0
        assert pool.in_use == 0


def test_a_small_output_does_not_keep_its_own_graph(streams: ThreadCopyStreams, observing: Observing) -> None:
    meter = observing([])
    store = Store(streams, HostPool(None, pinned=False), set(), 10**6)
    with store.capture():
        probabilities = torch.softmax(torch.randn(8, 8, requires_grad=True), dim=-1)
    assert meter.current == 4 * 64
    del probabilities
    assert meter.current == 0


def test_an_arena_a_little_too_large_serves() -> None:
    pool = HostPool(None, pinned=False)
    large = pool.take(96 << 20)
    assert large.size == large.bytes.numel() == 96 << 20
    assert large.bytes.data_ptr() % 4096 == 0
    pool.give(large)
    assert pool.take(87 << 20) is large
    smaller = pool.take(88 << 20)
    assert smaller is not large
    pool.give(large)
    pool.give(smaller)
    assert pool.take(87 << 20) is smaller
    assert pool.take(70 << 20) is not large
    assert rounded(1) == 4096
    assert all(size <= rounded(size) <= 1.125 * size for size in (2**15, 10**6, (2 << 20) + 1, 10**9))


def test_beyond_the_limit() -> None:
    pool = HostPool(16 << 20, pinned=False)
    small = pool.take(4 << 20)
    pool.give(pool.take(8 << 20))
    assert pool.allocated == 12 << 20
    middle = pool.take(6 << 20)  # in place of the one that is idle
    assert pool.allocated == pool.in_use == 10 << 20
    with pytest.raises(RuntimeError, match=r"need 20 MiB .* limit is 16 MiB.*: raise --offload-host-memory"):
        pool.take(10 << 20)
    pool.give(small)
    pool.give(middle)
    assert pool.take(16 << 20).size == pool.allocated == 16 << 20
    assert pool.most_in_use == 16 << 20


def test_unpinning_waits_for_the_last_copy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole device may be waiting for a message."""
    happened: list[str] = []
    event = SimpleNamespace(synchronize=lambda: happened.append("last copy"))
    stream = SimpleNamespace(record_event=lambda: event)
    cuda = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: happened.append("unpinned"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("the device"))
    pool = HostPool(8 << 20, pinned=True)
    pool.give(pool.take(8 << 20))
    small = pool.take(4 << 20)  # for which the idle arena has to go
    assert happened == ["last copy", "unpinned"]
    pool.give(small)
    small = pool.take(4 << 20)  # used again, and never given back
    del small, pool
    assert happened[2:] == ["the device", "unpinned"]


def test_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}

    def register(address: int, size: int, _: int) -> int:
        if size > 4 << 20:
            return 2
        pinned[address] = size
        return 0

    cuda = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop, cudaGetErrorString=lambda _: "out of memory")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    pool = HostPool(None, pinned=True)
    arena = pool.take((4 << 20) - 5)
    assert pinned == {arena.bytes.data_ptr(): 4 << 20}
    with pytest.raises(RuntimeError, match=r"pin 8 MiB .*out of memory.* 4 MiB .*ulimit -l.*--offload-host-memory"):
        pool.take(8 << 20)
    assert pool.in_use == pool.allocated == 4 << 20
    del arena
    del pool
    assert not pinned
