"""Sees every operation of torch: what it reads and writes, on which stream, and where the host waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_model.cuda import Device, device
from gpu_model.memory import _place
from gpu_model.order import HOST, At

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal", "item")
_NO_KERNEL = ("detach", "alias", "lift_fresh", "_unsafe_view", "set_", "resize_", "is_pinned", "record_stream")
_NO_READ = "empty_like new_empty new_empty_strided new_zeros new_ones new_full zeros_like ones_like full_like".split()


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the device's."""
    return device().memory.home(tensor) not in (None, HOST)


def host_reads(tensor: torch.Tensor, what: str) -> None:
    """The host waits for the current stream, and reads."""
    one = device()
    one.memory.use(tensor, one.launch(), what, write=False)
    one.host_waits_for(one.current, f"the host reads ({what})", _place())


def shared_methods() -> None:
    """Replace what tensors and storages have of pinned memory, streams, and memory that is given back."""
    tensor: Any = torch.Tensor
    storage: Any = torch.UntypedStorage
    resize = storage.resize_

    def pin(self: Any, *_: Any) -> Any:
        copy = self.clone()
        device().memory.allocate(copy, HOST, guarded=True)
        return copy

    def resized(self: Any, size: int) -> Any:
        result = resize(self, size)
        device().memory.sweep()
        device().memory.resize(self, device().current.name)
        return result

    storage.resize_, tensor.pin_memory = resized, pin
    tensor.is_pinned = lambda self, *_: device().memory.home(self) == HOST
    tensor.record_stream = lambda self, stream: device().memory.record(self, stream.name)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Of an operation's arguments or results, which are tensors, lists of tensors, or neither."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class _Making(threading.local):
    """Where the operations of this thread put what they make: None for where their inputs are."""

    where: torch.device | None = None


making = _Making()


def _product(func: Any, args: Any, kwargs: Any) -> Any:
    """What a GPU has and a CPU has not: a product of 16-bit factors in another precision."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if "out_dtype" not in given:
        return func(*args, **kwargs)
    result = {"out": given["out"]} if "out" in given else {}
    factors = [given[name].to(given["out_dtype"]) for name in ("self", "mat1", "mat2") if name in given]
    overload = getattr(func.overloadpacket, "out" if result else "default")
    product: torch.Tensor = overload(*factors, **result)
    return product


class Watch(TorchDispatchMode):
    """Every operation, which computes in CPU memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one, memory, kwargs = device(), device().memory, kwargs or {}
        memory.sweep()
        name = func._schema.name.rpartition("::")[2]
        given = [*_tensors(args), *_tensors(kwargs.values())]
        one.land(given)
        homes = [memory.home(tensor) for tensor in given]
        here = any(home not in (None, HOST) for home in homes)
        out = _product(func, args, kwargs) if func._overloadname.startswith("dtype") else func(*args, **kwargs)
        if func.is_view or name in _NO_KERNEL:
            return out
        made = [leaf for leaf in _tensors([out]) if not any(leaf is each for each in given)]
        landed = made if (here if making.where is None else making.where.type == "cuda") else []
        for tensor in landed:
            memory.allocate(tensor, one.current.name)
        if name in _READS and here:
            host_reads(given[0], name)
            return out
        if not here and not landed:
            if any(home == HOST for home in homes):
                self._note(func, args, kwargs, made, one.order.launch(HOST), name)
            return out
        self._note(func, args, kwargs, made, one.launch(), name)
        if name in ("copy_", "_to_copy", "_copy_from") and here:
            self._copied(name, args, kwargs, made, one)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor], at: At, name: str) -> None:
        memory = device().memory
        for argument, value in zip(func._schema.arguments, () if name in _NO_READ else args, strict=False):
            self._use(argument, value, at, name)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._use(argument, kwargs[argument.name], at, name)
        for tensor in made:
            memory.use(tensor, at, name, write=True)

    def _use(self, argument: Any, value: Any, at: At, name: str) -> None:
        written = bool(argument.alias_info and argument.alias_info.is_write)
        for tensor in _tensors([value]):
            device().memory.use(tensor, at, name, write=written)

    def _copied(self, name: str, args: Any, kwargs: Any, made: list[torch.Tensor], one: Device) -> None:
        """A copy between host and device: one that blocks the host, unless it may not and the host's memory is pinned."""
        source, target = (args[1], args[0]) if name == "copy_" else (args[0], made[0] if made else args[0])
        across = [on_device(source), on_device(target)]
        if across[0] == across[1]:
            return
        host = target if across[0] else source
        asked = kwargs.get("non_blocking", False) or (name == "copy_" and len(args) > 2 and args[2])
        if asked and one.memory.home(host) == HOST:
            return
        if across[0] or not asked:  # to the device from pageable memory, the driver stages what it was given
            why = f"a copy to {'the host' if across[0] else 'the device'}"
            one.host_waits_for(one.current, why, _place())
