"""CUDA graphs on a CPU: what is captured runs again with the same memory, and a private pool gives what is freed away at once.

``CUDAGraph``, ``graph`` and ``graph_pool_handle`` stand for torch's. Within ``graph`` every operation runs, and is noted with the
places of its tensors; what it makes is put into blocks of the pool. A block is free as soon as no tensor is in it, and the next
operation that it is large enough for takes it, of this capture or of a later one: a tensor that is to be there when graphs are
replayed has to be held until the last capture. ``replay`` runs the operations again, and each result goes where it went.

Within a capture nothing is computed on a GPU: memory that is not of the pool, and the generator, are then as they were before.

What a capture cannot have raises: a host that reads a result, a message of the pipeline, and a second capture of a graph.
Collectives it can have.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_map

_OWN_REFERENCES = 3  # to a block that nothing holds, in ``Pool.take``: the list of all, its name, and the argument
_MESSAGES = ("send", "recv_", "recv_any_source_", "barrier", "monitored_barrier_")
_READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_consecutive")
_BY_MASK = ("index", "index_put_")  # read how many are true


class NotCapturable(AssertionError):
    """An operation that would end a capture on a GPU."""


class Pool:
    """Memory of graphs that are captured with it; nothing of it goes back to the device."""

    def __init__(self) -> None:
        self._blocks: list[Any] = []
        self._numbers: dict[int, int] = {}

    def take(self, size: int) -> Any:
        """Storage of at least ``size`` bytes: of the blocks without a tensor the one that was made last, or else a new one."""
        for block in reversed(self._blocks):
            held = torch._C._storage_Use_Count(block._cdata) > 1 or sys.getrefcount(block) > _OWN_REFERENCES
            if block.nbytes() >= size and not held:
                return block
        block = torch.UntypedStorage(max(size, 1))
        self._numbers[block.data_ptr()] = len(self._blocks)
        self._blocks.append(block)
        return block

    def number(self, tensor: torch.Tensor) -> int | None:
        """The block in which a tensor is, also one that does not hold it (``weak``)."""
        return self._numbers.get(tensor.untyped_storage().data_ptr())

    def block(self, number: int) -> Any:
        return self._blocks[number]


@dataclass(frozen=True)
class _Place:
    """Where a tensor is: in a block of the pool, which this does not hold, or in memory of others."""

    pool: Pool
    block: int | None
    outside: torch.Tensor | None
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, pool: Pool, tensor: torch.Tensor) -> _Place:
        block = pool.number(tensor)
        outside = tensor.detach() if block is None else None
        return cls(pool, block, outside, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride())

    def tensor(self) -> torch.Tensor:
        if self.block is None:
            assert self.outside is not None
            return self.outside
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(self.pool.block(self.block), self.offset, self.size, self.stride)


class CUDAGraph:
    """Operations of a capture; random numbers are drawn anew in each replay.

    Attributes:
        replays: how often it has run.
    """

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, list[tuple[int, _Place]]]] = []
        self.captured = False
        self.replays = 0

    def reset(self) -> None:
        self.operations.clear()

    def replay(self) -> None:
        assert self.captured, "a graph that was never captured is replayed"
        self.replays += 1
        with torch.no_grad():
            for function, args, options, made in self.operations:
                given, named = tree_map(_there, (args, options))
                results = _ended(function(*given, **named))
                for number, place in made:
                    place.tensor().copy_(results[number])


def _is_mask(indices: Any) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _ended(results: Any) -> list[Any]:
    """Results, once a collective has ended: what gloo does in ``wait`` is a part of it."""
    flat: list[Any] = tree_flatten(results)[0]
    for result in flat:
        if isinstance(result, torch.ScriptObject):
            result.wait()  # type: ignore[attr-defined]
    return flat


def _there(one: Any) -> Any:
    return one.tensor() if isinstance(one, _Place) else one


class _Capturing(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph, pool: Pool) -> None:
        super().__init__()
        self._graph, self._pool = graph, pool
        self._before: dict[int, tuple[Any, Any]] = {}  # of what is not of the pool
        self._collected: set[int] = set()  # memory that collectives wrote

    def undo(self) -> None:
        """Take back what operations wrote beside the pool."""
        for storage, before in self._before.values():
            storage.copy_(before)

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = str(function.name()).split("::")
        if name.partition(".")[0] in _READS or (name.partition(".")[0] in _BY_MASK and _is_mask(args[1])):
            raise NotCapturable(f"the host reads a result within a capture: {name}")
        if namespace == "c10d" and name in _MESSAGES:
            raise NotCapturable(f"a message within a capture: {name}")
        inputs = {one.untyped_storage()._cdata for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)}
        noted = tree_map(lambda one: _Place.of(self._pool, one) if isinstance(one, torch.Tensor) else one, (args, kwargs))
        self._keep_what_it_writes(function, args, kwargs)
        results = function(*args, **kwargs)
        made = []
        for number, result in enumerate(_ended(results)):
            if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in inputs:
                self._move(result)
                made.append((number, _Place.of(self._pool, result)))
        if namespace == "c10d":
            self._collected |= inputs
        elif name == "copy_" and args[0].untyped_storage()._cdata in self._collected and self._pool.number(args[1]) is None:
            return results  # from gloo's own memory, at a second ``wait``
        if made or function._schema.is_mutable or namespace == "c10d":  # whose schemas do not say what they write
            self._graph.operations.append((function, *noted, made))
        return results

    def _keep_what_it_writes(self, function: Any, args: Any, kwargs: Any) -> None:
        arguments = function._schema.arguments
        given = [*zip(arguments, args, strict=False), *((one, kwargs[one.name]) for one in arguments if one.name in kwargs)]
        for argument, value in given:
            written = tree_flatten(value)[0] if argument.alias_info is not None and argument.alias_info.is_write else ()
            for one in (one for one in written if isinstance(one, torch.Tensor) and self._pool.number(one) is None):
                storage = one.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in self._before:
                    self._before[storage.data_ptr()] = storage, storage.clone()

    def _move(self, result: torch.Tensor) -> None:
        """Put a result into the pool."""
        block = self._pool.take(result.untyped_storage().nbytes())
        where = 0, result.size(), result.stride()
        torch.empty(0, dtype=result.dtype).set_(block, *where).copy_(result)
        result.set_(block, *where)


def graph_pool_handle() -> Pool:
    return Pool()


def is_current_stream_capturing() -> bool:
    return any(isinstance(mode, _Capturing) for mode in _get_current_dispatch_mode_stack())


@contextlib.contextmanager
def graph(captured: CUDAGraph, pool: Pool | None = None, **_: Any) -> Iterator[None]:
    """Capture a graph, once."""
    assert not captured.captured, "a graph is captured twice"
    captured.captured = True
    drawn, capturing = torch.get_rng_state(), _Capturing(captured, pool or Pool())
    with capturing:
        yield
    capturing.undo()
    torch.set_rng_state(drawn)


def weak(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the same memory that does not hold it: Transformer Engine's ``make_weak_ref``."""
    storage = tensor.untyped_storage()
    bytes_there = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory = torch.frombuffer(bytes_there, dtype=torch.uint8).untyped_storage()
    where = int(tensor.storage_offset()), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(memory, *where)
