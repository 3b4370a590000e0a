"""Activations in host memory: backward finds the same numbers, memory goes and comes when it should, and nothing is left."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.pipeline.model.split_linear import WeightGradient
from megatron.pipeline.model.weight_tasks import WeightTask, deferring, prepare, submit
from megatron.pipeline.runtime.memory import ActivationMeter
from megatron.pipeline.runtime.offload import activations
from megatron.pipeline.runtime.offload.activations import Store
from megatron.pipeline.runtime.offload.host_memory import Arena, HostPool, rounded
from megatron.pipeline.runtime.offload.lanes import Lanes, Pairs, ThreadLanes, Ticket, lanes_for

WIDTH, HEADS, TOKENS, BATCH = 32, 4, 16, 2
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


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
        submit(WeightGradient(ctx.weight, input, gradient, None))
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


@pytest.fixture
def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(True), Layer(False))


@pytest.fixture
def lanes() -> Iterator[ThreadLanes]:
    some = ThreadLanes()
    yield some
    some.close()


def stores(
    model: torch.nn.Module, lanes: Lanes, pool: HostPool, meter: ActivationMeter | None = None, smallest: int = 64
) -> Callable[[], Store]:
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return lambda: Store(lanes, pool, parameters, lambda some: [meter.hold(one) for one in some] if meter else [], smallest)


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


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("full", [False, True])
def test_gradients_are_the_same_and_nothing_is_allocated_again(model: torch.nn.Sequential, device: str, full: bool) -> None:
    model.to(device)
    plain = train(model, None, full=full)
    lanes, pool = lanes_for(torch.device(device)), HostPool(None, pinned=device == "cuda")
    make = stores(model, lanes, pool)
    for _ in range(2):
        assert same(train(model, make, full=full), plain)
    lanes.close()
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
    lanes = Poisoning(*bandwidths)
    assert same(train(model, stores(model, lanes, PoisonedPool(None, pinned=False))), plain)
    lanes.close()


class Poisoning(ThreadLanes):
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


@pytest.mark.parametrize("direction", ["to_host", "to_device"])
def test_poison_is_noticed(model: torch.nn.Sequential, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wait does not wait."""
    monkeypatch.setattr(activations, "_blank", lambda nbytes, _: torch.full((nbytes,), 255, dtype=torch.uint8))
    plain = train(model, None, (TOKENS,))
    lanes = Poisoning(1e6, 1e6)
    start = getattr(ThreadLanes, direction)
    monkeypatch.setattr(ThreadLanes, direction, lambda self, pairs: Unawaited(start(self, pairs)))
    assert not same(train(model, stores(model, lanes, PoisonedPool(None, pinned=False)), (TOKENS,)), plain)
    lanes.close()


class Unawaited:
    def __init__(self, ticket: Ticket) -> None:
        self.times = (0.0, 0.0)

    def wait(self) -> None:
        """At once."""


def test_what_is_counted_goes_and_comes_back(
    model: torch.nn.Sequential, lanes: ThreadLanes, request: pytest.FixtureRequest
) -> None:
    meter = ActivationMeter(model.parameters())
    x = torch.randn(TOKENS, BATCH, WIDTH, requires_grad=True)
    with meter.saving():
        graph = model(x).square().mean()
    plain = meter.current
    del graph
    assert meter.current == 0
    gc.disable()  # nothing waits for the garbage collector
    request.addfinalizer(gc.enable)
    store = stores(model, lanes, HostPool(None, pinned=False), meter)()
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


def test_memory_goes_as_backward_frees_it(lanes: ThreadLanes) -> None:
    meter = ActivationMeter([])
    store = Store(lanes, HostPool(None, pinned=False), set(), lambda some: [meter.hold(one) for one in some], 0)
    x = torch.randn(1000, requires_grad=True)
    with store.capture():
        first = x.exp()
        second = first.exp()
    move(store)
    assert meter.current == 2 * 4000
    gradient = torch.autograd.grad(second, first, torch.ones(1000))[0]  # the graph of one of the two
    assert meter.current == 4000
    assert torch.equal(gradient, second)


def move(store: Store) -> None:
    store.start_offload()
    store.finish_offload()
    store.start_reload()
    store.finish_reload()


def test_what_forward_drops_does_not_travel(lanes: ThreadLanes) -> None:
    store = Store(lanes, HostPool(None, pinned=False), set(), lambda _: [], 0)
    x = torch.randn(1000, requires_grad=True)
    with store.capture():
        kept = x.exp()
        x.sin().cos()
    move(store)
    assert store.bytes == 4000
    assert torch.equal(torch.autograd.grad(kept.sum(), x)[0], kept)


@pytest.mark.parametrize("when", ["before the copy", "during the copy", "never copied", "small"])
def test_a_change_in_place_is_an_error(lanes: ThreadLanes, when: str) -> None:
    store = Store(lanes, HostPool(None, pinned=False), set(), lambda _: [], 10**6 if when == "small" else 0)
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


def test_backward_of_what_is_away_is_an_assertion(lanes: ThreadLanes) -> None:
    store = Store(lanes, HostPool(None, pinned=False), set(), lambda _: [], 0)
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


def test_what_stays_is_what_it_was(lanes: ThreadLanes) -> None:
    """Sparse tensors, subclasses, complex conjugates, parameters."""
    meter = ActivationMeter([])
    weight = torch.nn.Parameter(torch.randn(8, 8))
    saved: list[Any] = [
        weight,
        torch.eye(8).to_sparse(),
        torch.randn(8, 8).as_subclass(Subclass),
        torch.randn(8, 8, dtype=torch.complex64).conj(),
    ]
    store = Store(lanes, HostPool(None, pinned=False), set(), lambda some: [meter.hold(one) for one in some], 0)

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


@pytest.mark.parametrize("moment", range(5))
def test_an_iteration_is_given_up_at_any_moment(model: torch.nn.Sequential, moment: int) -> None:
    lanes, pool = ThreadLanes(2e7, 2e7), HostPool(None, pinned=False)
    meter = ActivationMeter(model.parameters())
    store = stores(model, lanes, pool, meter)()
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
    lanes.close()


def test_graphs_may_die_without_a_backward(model: torch.nn.Sequential, lanes: ThreadLanes) -> None:
    meter, pool = ActivationMeter(model.parameters()), HostPool(None, pinned=False)
    for before in range(5):
        store = stores(model, lanes, pool, meter)()
        with store.capture():
            graph = [model(torch.randn(TOKENS, BATCH, WIDTH)).square().mean()]
        for number, step in enumerate([store.start_offload, store.finish_offload, store.start_reload, store.finish_reload]):
            if number == before:
                graph.clear()
            step()
        graph.clear()
        assert meter.current == 0
        assert pool.in_use == 0


def test_a_small_output_does_not_keep_its_own_graph(lanes: ThreadLanes) -> None:
    meter = ActivationMeter([])
    store = Store(lanes, HostPool(None, pinned=False), set(), lambda some: [meter.hold(one) for one in some], 10**6)
    with store.capture():
        probabilities = torch.softmax(torch.randn(8, 8, requires_grad=True), dim=-1)
    assert meter.current == 4 * 64
    del probabilities
    assert meter.current == 0


# Host memory.


def test_sizes_that_vary_are_allocated_once(model: torch.nn.Sequential, lanes: ThreadLanes) -> None:
    pool = HostPool(None, pinned=False)
    make = stores(model, lanes, pool)
    lengths = [(16, 4, 8), (8, 16, 4), (4, 8, 16)]
    train(model, make, lengths[0])
    before = pool.allocations
    for one in lengths:
        assert same(train(model, make, one), train(model, None, one))
    assert pool.allocations == before


def test_an_arena_a_little_too_large_serves() -> None:
    pool = HostPool(None, pinned=False)
    large = pool.take(100 << 20)
    assert large.size == large.bytes.numel() == 100 << 20
    assert large.bytes.data_ptr() % 4096 == 0
    pool.give(large)
    assert pool.take(85 << 20) is large
    smaller = pool.take(90 << 20)
    assert smaller is not large
    pool.give(large)
    pool.give(smaller)
    assert pool.take(85 << 20) is smaller
    assert pool.take(70 << 20) is not large
    assert rounded(1) == 4096
    assert rounded((2 << 20) + 1) == 4 << 20


def test_beyond_the_limit() -> None:
    pool = HostPool(16 << 20, pinned=False)
    small = pool.take(4 << 20)
    pool.give(pool.take(8 << 20))
    assert pool.allocated == 12 << 20
    middle = pool.take(6 << 20)  # in place of the one that is idle
    assert pool.allocated == pool.in_use == 10 << 20
    with pytest.raises(RuntimeError, match=r"need 0\.020 GiB .* limit is 0\.016 GiB .*: raise --offload-host-memory"):
        pool.take(10 << 20)
    pool.give(small)
    pool.give(middle)
    assert pool.take(16 << 20).size == pool.allocated == 16 << 20
    assert pool.most_in_use == 16 << 20


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
    arena = pool.take(3 << 20)
    assert pinned == {arena.bytes.data_ptr(): 4 << 20}
    with pytest.raises(RuntimeError, match=r"pin 0\.008 GiB .*out of memory.* 0\.004 GiB .*ulimit -l.*--offload-host-memory"):
        pool.take(8 << 20)
    assert pool.in_use == pool.allocated == 4 << 20
    del arena
    del pool
    assert not pinned


# Lanes.


def test_each_direction_copies_in_order(lanes: ThreadLanes) -> None:
    first, second, target = torch.ones(1000), torch.full((1000,), 2.0), torch.zeros(1000)
    tickets = [lanes.to_host([(first, target)]), lanes.to_host([(second, target)])]
    for ticket in reversed(tickets):
        ticket.wait()
    assert torch.equal(target, second)
    assert tickets[0].times[1] <= tickets[1].times[0]


def test_a_slow_direction_does_not_hold_up_the_other() -> None:
    lanes = ThreadLanes(bandwidth_to_host=1.0)
    slow, fast, source = torch.zeros(1000), torch.zeros(1000), torch.ones(1000)
    lanes.to_host([(source, slow)])
    for _ in range(10):
        lanes.to_device([(source, fast)]).wait()
    assert fast.sum() == 1000
    assert slow.sum() == 0
    lanes.close()


def test_nothing_is_held_once_it_is_copied(lanes: ThreadLanes) -> None:
    source = torch.ones(1000)
    alive = weakref.ref(source)
    ticket = lanes.to_host([(source, torch.zeros(1000))])
    del source
    ticket.wait()
    assert alive() is None


def test_an_error_is_raised_where_it_is_waited_for(lanes: ThreadLanes) -> None:
    ticket = lanes.to_device([(torch.ones(3), torch.ones(4))])
    with pytest.raises(RuntimeError, match="size"):
        ticket.wait()
    target = torch.zeros(3)
    lanes.to_device([(torch.ones(3), target)]).wait()
    assert target.sum() == 3


@pytest.mark.parametrize("how", ["close", "garbage"])
def test_threads_end(how: str) -> None:
    before = set(threading.enumerate())
    lanes: Any = ThreadLanes(1.0, 1.0)
    threads = set(threading.enumerate()) - before
    ticket = lanes.to_host([(torch.ones(1000), torch.ones(1000))])  # would take more than an hour
    assert len(threads) == 2
    if how == "close":
        lanes.close()
        with pytest.raises(RuntimeError, match="closed"):
            lanes.to_host([])
    del lanes
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="closed"):
        ticket.wait()


def test_a_process_ends_with_copies_under_way() -> None:
    program = (
        "import torch; from megatron.pipeline.runtime.offload.lanes import ThreadLanes; lanes = ThreadLanes(1.0, 1.0);"
        "lanes.to_device([(torch.ones(1000), torch.ones(1000))])"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
