"""Which work uses which bytes, and what of that is not ordered: races between streams, and memory reused while in use.

Device memory is the caching allocator's: a block belongs to the stream that was current when it was allocated, and goes back to
that stream's pool at the moment in which the last tensor dies on the host. The next tensor may get it at once, in that stream's
order (torch.cuda's notes, "Memory management"; c10/cuda/CUDACachingAllocator.cpp). ``record_stream`` keeps it back until what was
launched on another stream is over. Pinned host memory is used by the host at the moment of the call.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_model.order import HOST, At, Order
from gpu_model.trace import Trace

_OURS = ("/megatron/pipeline/", "/patches/")
_MODEL = str(Path(__file__).parent)


class Use(NamedTuple):
    """Some work on some bytes.

    Attributes:
        at: when.
        what: the operation.
        place: the file and line of the product that started it.
    """

    at: At
    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.what} on stream {self.at.timeline} ({self.place})"


class Race(NamedTuple):
    """Two uses that nothing orders.

    Attributes:
        kind: "read", "write" of bytes that an earlier use may still be at; or "reuse", of memory that goes back to its pool.
        later: what comes too early; None for a reuse, which the next allocation brings.
        earlier: what may still run.
        bytes: of the block.
    """

    kind: str
    later: Use | None
    earlier: Use
    bytes: int

    def __str__(self) -> str:
        if self.later is None:
            return f"memory ({self.bytes} bytes) goes back to its pool while {self.earlier} may still run"
        return f"{self.kind} by {self.later} of {self.bytes} bytes that {self.earlier} may still use"


class _Span(NamedTuple):
    timeline: str
    low: int
    high: int
    write: bool


class _Alive(weakref.ref[torch.UntypedStorage]):
    """A storage, by the address that C++ knows it by, as long as it lives: in Python or in C++, which keeps its Python object."""

    key: int

    @classmethod
    def of(cls, storage: torch.UntypedStorage, died: Callable[[Any], None]) -> _Alive:
        alive = cls(storage, died)
        alive.key = storage._cdata
        return alive


@dataclass
class _Block:
    """A storage on the device, or in pinned host memory.

    Attributes:
        alive: names nothing once the storage has died.
        home: the stream whose pool it came from; the host for pinned memory.
        uses: the last of every timeline on every span.
        recorded: streams of ``record_stream``.
        guarded: pinned memory of torch's own allocator, which asks all streams that have used it before it gives it away.
    """

    alive: _Alive
    home: str
    bytes: int
    uses: dict[_Span, Use] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)
    guarded: bool = False


class Memory:
    """The blocks of one rank.

    Attributes:
        races: what was found, each pair of places once.
        allocated, peak: bytes on the device.
        registered: addresses of host memory that the product has pinned itself.
    """

    def __init__(self, order: Order, trace: Trace) -> None:
        self._order, self._trace = order, trace
        self._blocks: dict[int, _Block] = {}
        self._died: deque[_Alive] = deque()  # since the last sweep
        self._at: tuple[At, str] | None = None  # the last use, and its place, which all uses of one operation share
        self._found: set[tuple[str, str, str]] = set()
        self.races: list[Race] = []
        self.allocated = 0
        self.peak = 0
        self.registered: set[int] = set()

    def allocate(self, tensor: torch.Tensor, home: str, guarded: bool = False) -> None:
        """A tensor's storage is on the device from now on, or pinned (``home`` is the host)."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if (block := self._blocks.get(key)) is not None:
            if block.alive() is not None:
                return
            self._free(key)
        self._blocks[key] = _Block(_Alive.of(storage, self._died.append), home, storage.nbytes(), guarded=guarded)
        if home != HOST:
            self._take(storage.nbytes())

    def resize(self, storage: torch.UntypedStorage, home: str) -> None:
        """A storage has another size: its memory went back, and other memory, if any, came from a stream's pool."""
        block = self._blocks.get(storage._cdata)
        if block is None or block.alive() is None or block.bytes == storage.nbytes():
            return
        self._free(storage._cdata)
        self._blocks[storage._cdata] = _Block(block.alive, home, storage.nbytes())
        self._take(storage.nbytes())

    def home(self, tensor: torch.Tensor) -> str | None:
        """Where a tensor is: the stream whose pool its storage came from, the host for pinned memory, None for other memory."""
        block = self._block(tensor)
        return block.home if block is not None and block.alive() is not None else None

    def use(self, tensor: torch.Tensor, at: At, what: str, write: bool) -> None:
        """Work on a tensor's bytes."""
        block = self._block(tensor)
        if block is None or not tensor.numel():
            return
        low, high = _extent(tensor)
        if self._at is None or self._at[0] is not at:
            self._at = at, _place()
        use = Use(at, what, self._at[1])
        for span, earlier in list(block.uses.items()):
            if span.low >= high or span.high <= low:
                continue
            ordered = span.timeline == at.timeline or self._order.comes_before(earlier.at, at.timeline)
            if (write or span.write) and not ordered:
                self._report(Race("write" if write else "read", use, earlier, block.bytes))
            if write and low <= span.low and span.high <= high:
                del block.uses[span]
        block.uses[_Span(at.timeline, low, high, write)] = use

    def record(self, tensor: torch.Tensor, stream: str) -> None:
        """``record_stream``."""
        if (block := self._block(tensor)) is not None:
            block.recorded.add(stream)

    def sweep(self) -> None:
        """Give back the memory of what has died."""
        while self._died:
            alive = self._died.popleft()
            block = self._blocks.get(alive.key)
            if block is not None and block.alive is alive:
                self._free(alive.key)

    def forget(self) -> None:
        """Let go of what was found, so that it is reported when it is found again."""
        self.races.clear()
        self._found.clear()

    def _take(self, size: int) -> None:
        self._trace.takes(size)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def _free(self, key: int) -> None:
        block = self._blocks.pop(key)
        if block.home != HOST:
            self._trace.gives(block.bytes, sorted(block.recorded))
            self.allocated -= block.bytes
        for use in () if block.guarded else block.uses.values():
            # The host launches what uses it next; the allocator asks an event on each of the recorded streams before that.
            if not any(self._order.comes_before(use.at, timeline) for timeline in (block.home, HOST, *block.recorded)):
                self._report(Race("reuse", None, use, block.bytes))

    def _block(self, tensor: torch.Tensor) -> _Block | None:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None and self.registered:
            first = storage.data_ptr()
            if any(first <= address < first + storage.nbytes() for address in self.registered):
                self.allocate(tensor, HOST)
                block = self._blocks[storage._cdata]
        return block

    def _report(self, race: Race) -> None:
        key = race.kind, race.later.place if race.later else "", race.earlier.place
        if key not in self._found:
            self._found.add(key)
            self.races.append(race)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and that behind the last."""
    low = tensor.storage_offset() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(low), int(low + (last + 1) * tensor.element_size())


def _place() -> str:
    """The line of the product, or else of who called it, that the host is in."""
    other = ""
    for frame, line in _frames():
        ours, name = _shown(frame)
        if ours:
            return f"{name}:{line}"
        if name and not other:
            other = f"{name}:{line}"
    return other


@cache
def _shown(file: str) -> tuple[bool, str]:
    """Whether a file is the product's, and how its places are named: not at all if it is torch's or the device model's."""
    if any(part in file for part in _OURS):
        return True, file.rpartition("/megatron/pipeline/")[2] or file
    return False, file if "/torch/" not in file and (not file.startswith(_MODEL) or "/test_" in file) else ""


def _frames() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
