"""``torch.cuda`` of the posing device: streams and events that order, and say so to the checker; nothing computes on them."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from gpu_model.memory import Memory, _place
from gpu_model.order import HOST, At, Clock, Order
from gpu_model.trace import NEVER, Mark, Trace

CUDA = torch.device("cuda", 0)
_numbers = itertools.count(1)
_FREQUENCY = 2e9  # Hz, of the clock that ``torch.cuda._sleep`` counts


class Sync(NamedTuple):
    """A wait of the host: why, where in the code, and for which stream; for an event none is named."""

    why: str
    place: str
    stream: str


class Device:
    """One rank's device, and what the host has asked of it.

    Attributes:
        order, memory: what is known of the order of work, and of the memory that it uses.
        syncs: where the host waited for the device.
        trace: all of that in its order, where it is recorded.
    """

    def __init__(self) -> None:
        self.order = Order()
        self.trace = Trace()
        self.memory = Memory(self.order, self.trace)
        self.default = Stream(name="compute")
        self.syncs: list[Sync] = []
        self._local = threading.local()
        # Storages that gloo has yet to fill, and how to wait for that.
        self.arriving: list[tuple[set[int], Callable[[], None]]] = []
        self.waits: list[Callable[[], None]] = []  # what ``synchronize`` waits for beside the streams: posted messages

    @property
    def current(self) -> Stream:
        stream: Stream = getattr(self._local, "stream", self.default)
        return stream

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """``torch.cuda.stream``."""
        before = self.current
        self._local.stream = stream or before
        try:
            yield
        finally:
            self._local.stream = before

    def land(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have what arrives in some tensors be there, whether or not a stream has waited for it: numbers stay true, and what
        was not ordered is a race in the report."""
        if self.arriving:
            storages = {tensor.untyped_storage()._cdata for tensor in tensors}
            for targets, wait in [one for one in self.arriving if one[0] & storages]:
                self.arriving.remove((targets, wait))
                wait()

    def launch(self, stream: Stream | None = None) -> At:
        """One kernel or copy on a stream; the current one by default."""
        name = (stream or self.current).name
        self.trace.kernel(name)
        return self.order.launch(name)

    def host_waits(self, clock: Clock, moment: int, why: str, place: str, stream: str = "") -> None:
        """The host blocks until an event has happened."""
        self.memory.sweep()
        self.syncs.append(Sync(why, place, stream))
        self.trace.host_waits(moment, place)
        self.order.wait(HOST, clock)

    def host_waits_for(self, stream: Stream, why: str, place: str) -> None:
        """The host blocks until a stream has done what it was given."""
        self.host_waits(self.order.record(stream.name), self.trace.add(Mark(stream.name)), why, place, stream.name)

    def synchronize(self) -> None:
        """The host blocks until every stream is done, also with the messages that were posted."""
        for wait in list(self.waits):
            wait()
        self.memory.sweep()
        self.syncs.append(Sync("synchronize", _place(), "all"))
        self.trace.host_waits(None, _place())
        self.order.wait_for_all()
        _pass(self.current.busy_until)


_device: Device | None = None


def device() -> Device:
    """This process's."""
    assert _device is not None, "pose() makes it"
    return _device


class Stream:
    """A queue of the device. ``name`` is unique."""

    def __init__(self, device: Any = None, priority: int = 0, name: str | None = None, **_: Any) -> None:
        self.name = name or f"stream {next(_numbers)}"
        self.priority = priority
        self.device = CUDA
        self.cuda_stream = self.stream_id = hash(self.name) if name != "compute" else 0
        self.device_index, self.device_type = 0, 1
        self.busy_until = 0.0  # by the host's clock; only ``torch.cuda._sleep`` takes time

    def wait_event(self, event: Event) -> None:
        device().memory.sweep()
        if event.clock is not None:
            device().order.wait(self.name, event.clock)
            device().trace.follow(self.name, event.moment)
            self.busy_until = max(self.busy_until, event.at)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        device().host_waits_for(self, "synchronize of a stream", _place())
        _pass(self.busy_until)

    def query(self) -> bool:
        return time.perf_counter() >= self.busy_until

    def __enter__(self) -> Stream:
        self._on = device().on(self)
        self._on.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._on.__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Event:
    """A place in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock | None = None
        self.moment = NEVER
        self.at = 0.0  # when it happens

    def record(self, stream: Stream | None = None) -> None:
        device().memory.sweep()
        stream = stream or device().current
        self.clock, self.moment = device().order.record(stream.name), device().trace.add(Mark(stream.name))
        self.at = max(time.perf_counter(), stream.busy_until)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or device().current).wait_event(self)

    def synchronize(self) -> None:
        if self.clock is not None:
            device().host_waits(self.clock, self.moment, "synchronize of an event", _place())
            _pass(self.at)

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds, of the host's clock when they were recorded."""
        return (other.at - self.at) * 1000


def _pass(moment: float) -> None:
    """The host's time until then."""
    time.sleep(max(0.0, moment - time.perf_counter()))


class _NoRange:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def names() -> dict[str, Any]:
    """What takes the place of ``torch.cuda``'s own names."""

    def allocated(*_: Any) -> int:
        device().memory.sweep()
        return device().memory.allocated

    def peak(*_: Any) -> int:
        device().memory.sweep()
        return device().memory.peak

    def reset(*_: Any) -> None:
        device().memory.sweep()
        device().memory.peak = device().memory.allocated

    def sleep(cycles: int) -> None:
        device().launch()
        device().current.busy_until = max(time.perf_counter(), device().current.busy_until) + cycles / _FREQUENCY

    def all_of(names: str, answer: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        """A function of its own for each name: torch.compile's tables want no two names for one."""
        return {name: functools.partial(answer) for name in names.split()}

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def register(address: int, *_: Any) -> int:
        device().memory.registered.add(address)
        return 0

    def unregister(address: int) -> int:
        device().memory.registered.discard(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    ranges = SimpleNamespace(range=lambda *_: _NoRange(), range_push=nothing, range_pop=nothing, mark=nothing)
    return {
        **all_of("is_available is_initialized is_bf16_supported", lambda *_: True),
        **all_of("set_device set_stream empty_cache _lazy_init init ipc_collect check_error", nothing),
        **all_of("manual_seed manual_seed_all", torch.default_generator.manual_seed),
        **all_of("memory_allocated memory_reserved", allocated),
        **all_of("max_memory_allocated max_memory_reserved", peak),
        "_lazy_call": lambda call, **_: call(),
        "_sleep": sleep,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: device().on(stream),
        "current_stream": lambda *_: device().current,
        "default_stream": lambda *_: device().default,
        "synchronize": lambda *_: device().synchronize(),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda *_: "posing",
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(
            total_memory=80 * 2**30, major=9, minor=0, name="posing", multi_processor_count=132, L2_cache_size=50 * 2**20
        ),
        "is_current_stream_capturing": lambda: False,
        "reset_peak_memory_stats": reset,
        "memory_stats": lambda *_: {"allocated_bytes.all.current": allocated()},
        "memory_stats_as_nested_dict": lambda *_: {"allocated_bytes": {"all": {"current": allocated(), "peak": peak()}}},
        "mem_get_info": lambda *_: (80 * 2**30 - allocated(), 80 * 2**30),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "default_generators": (torch.default_generator,),
        "cudart": lambda: runtime,
        "nvtx": ranges,
    }


def install() -> None:
    """Have ``torch.cuda`` be this process's device, for good."""
    global _device
    _device = Device()
    for name, value in names().items():
        for module in (torch.cuda, torch.cuda.random):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    # One generator plays the host's and the device's: megatron-core warns that the one changes with the other.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    generator = torch.Generator
    torch.Generator = lambda *_, **__: generator()  # type: ignore[assignment, misc]
