"""The device of ``shim.cpp``: what autograd's engine asks of its streams and events, put where all others are."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_model.cuda import Device, Stream
from gpu_model.memory import _place
from gpu_model.order import Clock
from gpu_model.trace import Mark

SOURCE = Path(__file__).with_name("shim.cpp")
_REPORT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class NoCompiler(Exception):
    """Why the shim cannot be built here."""


def build(folder: Path) -> Path:
    """Compile the shim for the torch that is installed, unless the folder has it already: 2 seconds.

    Raises:
        NoCompiler: no compiler, no headers of torch, or a torch whose interface is another; with what the compiler said.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NoCompiler("no C++ compiler: g++, or what CXX names")
    home = Path(torch.__path__[0])
    if not (home / "include" / "c10").is_dir():
        raise NoCompiler("this torch has no headers")
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {home}".encode()).hexdigest()[:16]
    library = folder / f"shim-{key}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        command = f"{compiler} -shared -fPIC -O0 -std=c++20 -I{home}/include {SOURCE} -o {part} -L{home}/lib -lc10 -ltorch_cpu"
        said = subprocess.run(command.split(), capture_output=True, text=True, timeout=300, check=False)
        if said.returncode:
            raise NoCompiler(f"the shim does not compile with torch {torch.__version__}: {said.stderr[-2000:]}")
        part.replace(library)
    return library


class EngineDevice(Device):
    """A device whose current stream is that of C++, a thread's own: autograd's engine sets it for each of its nodes.

    Attributes:
        failed: errors in what C++ has called.
    """

    def __init__(self, library: Path) -> None:
        self._shim = ctypes.CDLL(str(library))
        self._shim.set_stream.argtypes = [ctypes.c_int64]
        self._shim.get_stream.restype = ctypes.c_int64
        self._shim.storage_of.argtypes, self._shim.storage_of.restype = [ctypes.c_int64], ctypes.c_int64
        super().__init__()
        self._streams: dict[int, Stream] = {self.default.stream_id: self.default}
        self._events: dict[int, tuple[Clock, int]] = {}
        self._engine: Counter[str] = Counter()
        self._without: str | None = None
        self.failed: list[BaseException] = []
        self._report = _REPORT(self._reported)
        self._shim.start(self._report)

    @property
    def current(self) -> Stream:
        return self._streams[self._shim.get_stream()]

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before = self.current
        stream = stream or before
        self._streams[stream.stream_id] = stream
        self._shim.set_stream(stream.stream_id)
        try:
            yield
        finally:
            self._shim.set_stream(before.stream_id)

    def begin(self, without: str | None = None) -> None:
        """Count anew.

        Args:
            without: what the engine does not do from now on: a mutation.
        """
        self._engine.clear()
        self.failed.clear()
        self._without = without

    def did(self) -> dict[str, int]:
        """How many events the engine recorded and waited for, and how often it recorded memory on a stream."""
        return dict(self._engine)

    def _reported(self, what: int, which: int, stream: int) -> None:
        """Called by C++: what is raised here would be lost."""
        try:
            told: Callable[[int, str], Any] = (self._recorded, self._follows, self._uses, self._host_waits)[what]
            self._engine[told.__name__] += 1
            self.memory.sweep()
            if told.__name__ != self._without:
                told(which, self._streams[stream].name)
        except BaseException as error:
            self.failed.append(error)

    def _recorded(self, event: int, stream: str) -> None:
        self._events[event] = self.order.record(stream), self.trace.add(Mark(stream))

    def _follows(self, event: int, stream: str) -> None:
        clock, moment = self._events[event]
        self.order.wait(stream, clock)
        self.trace.follow(stream, moment)

    def _uses(self, data: int, stream: str) -> None:
        self.memory.record_storage(self._shim.storage_of(data), stream)

    def _host_waits(self, _: int, stream: str) -> None:
        [waited] = [one for one in self._streams.values() if one.name == stream]
        self.host_waits_for(waited, "synchronize of a stream in C++", _place())
