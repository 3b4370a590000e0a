"""CPU memory that poses as a GPU's: factories, copies and attributes of tensors, and what every operation reads and writes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu_model import cuda
from gpu_model.cuda import CUDA, Device, device
from gpu_model.memory import _place
from gpu_model.order import HOST, At

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint randn "
    "randn_like randperm tensor zeros zeros_like"
).split()
_NEW = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal", "item")
_NO_KERNEL = ("detach", "alias", "lift_fresh", "_unsafe_view", "set_", "resize_", "is_pinned", "record_stream")
_NO_READ = (
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "new_ones",
    "new_full",
    "zeros_like",
    "ones_like",
    "full_like",
)
_real_device = torch.Tensor.device

__all__ = ["CUDA", "Device", "device", "pose"]


def pose() -> None:
    """Have this process believe that it has a GPU; for good."""
    import torch._dynamo

    from gpu_model import nccl

    torch._dynamo.config.disable = True  # there is no GPU to compile for
    cuda.place_device()
    for name, value in cuda.names().items():
        for module in (torch.cuda, torch.cuda.random):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    for name in _FACTORIES:
        setattr(torch, name, _made(getattr(torch, name), like=name.endswith("_like")))
    for name in _NEW:
        setattr(torch.Tensor, name, _made(getattr(torch.Tensor, name), like=True))
    # One generator plays the host's and the device's: megatron-core warns that the one changes with the other.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    generator = torch.Generator
    torch.Generator = lambda *_, **__: generator()  # type: ignore[assignment, misc]
    _methods()
    nccl.install()
    _Watch().__enter__()


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor poses as the device's."""
    return device().memory.home(tensor) not in (None, HOST)


class _Making:
    """Where the operations of this thread put what they make: None for where their inputs are."""

    where: torch.device | None = None


_making = _Making()


def _is_cuda(where: Any) -> bool:
    if isinstance(where, int):
        return True
    return torch.device(where).type == "cuda"


def _made(factory: Callable[..., Any], like: bool) -> Callable[..., Any]:
    """A factory that takes ``device=`` and ``pin_memory=``."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        where, pinned = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if where is None and like and isinstance(args[0], torch.Tensor):
            where = args[0].device
        before, _making.where = _making.where, CUDA if where is not None and _is_cuda(where) else _CPU
        try:
            tensor = factory(*args, **kwargs)
        finally:
            _making.where = before
        if pinned:
            device().memory.allocate(tensor, HOST, guarded=True)
        if where is not None and _is_cuda(where) and not on_device(tensor):
            _from_host(tensor)
        return tensor

    return make


def _from_host(tensor: torch.Tensor) -> None:
    """What ``torch.tensor`` makes of numbers is copied to the device; the host waits for that."""
    one = device()
    one.memory.allocate(tensor, one.current.name)
    one.memory.use(tensor, one.launch(), "tensor", write=True)
    one.host_waits_for(one.current, "a copy to the device", _place())


def _methods() -> None:
    tensor: Any = torch.Tensor
    tensor.device = property(lambda self: CUDA if on_device(self) else _real_device.__get__(self))
    tensor.is_cuda = property(on_device)
    tensor.is_cpu = property(lambda self: not on_device(self))
    tensor.get_device = lambda self: 0 if on_device(self) else -1
    tensor.is_pinned = lambda self, *_: device().memory.home(self) == HOST
    tensor.record_stream = lambda self, stream: device().memory.record(self, stream.name)
    to, kind, tolist, numpy = tensor.to, tensor.type, tensor.tolist, tensor.numpy

    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        where = kwargs.pop("device", None)
        rest = []
        for value in args:
            if isinstance(value, (torch.device, str)) or (isinstance(value, int) and not isinstance(value, bool)):
                where = value
            elif isinstance(value, torch.Tensor):
                where = value.device
                rest.append(value.dtype)
            elif isinstance(value, bool):
                kwargs["non_blocking"] = value
            elif value is not None:
                rest.append(value)
        if where is None or _is_cuda(where) == self.is_cuda:
            return to(self, *rest, **kwargs) if rest or kwargs else self
        before, _making.where = _making.where, CUDA if _is_cuda(where) else _CPU
        try:
            return to(self, *rest, **kwargs | {"copy": True})
        finally:
            _making.where = before

    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = dtype.replace("torch.cuda.", "torch.")
        if dtype is not None:
            return kind(self, dtype, *args, **kwargs)
        return kind(self).replace("torch.", "torch.cuda.", 1) if self.is_cuda else kind(self)

    def read(method: Callable[..., Any]) -> Callable[..., Any]:
        def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
            device().land([self])
            if on_device(self):
                _host_reads(self, method.__name__)
            elif device().memory.home(self) == HOST:
                device().memory.use(self, device().order.launch(HOST), method.__name__, write=False)
            return method(self, *args, **kwargs)

        return reading

    def pin(self: Any, *_: Any) -> Any:
        copy = self.clone()
        device().memory.allocate(copy, HOST, guarded=True)
        return copy

    storage: Any = torch.UntypedStorage
    resize = storage.resize_

    def resized(self: Any, size: int) -> Any:
        result = resize(self, size)
        device().memory.sweep()
        device().memory.resize(self, device().current.name)
        return result

    storage.resize_ = resized
    tensor.to, tensor.type, tensor.tolist, tensor.numpy, tensor.pin_memory = move, type_, read(tolist), read(numpy), pin
    tensor.cuda = lambda self, where=None, non_blocking=False, **_: self.to(CUDA, non_blocking=non_blocking)
    tensor.cpu = lambda self, **_: self.to(_CPU)


def _host_reads(tensor: torch.Tensor, what: str) -> None:
    """The host waits for the current stream, and reads."""
    one = device()
    one.memory.use(tensor, one.launch(), what, write=False)
    one.host_waits_for(one.current, f"the host reads ({what})", _place())


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


class _Watch(TorchDispatchMode):
    """Sees every operation: what it reads and writes, where, on which stream; and where the host waits for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        one, memory, kwargs = device(), device().memory, kwargs or {}
        memory.sweep()
        name = func._schema.name.rpartition("::")[2]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        one.land(given)
        homes = [memory.home(tensor) for tensor in given]
        here = any(home not in (None, HOST) for home in homes)
        into = _making.where
        out = _product(func, args, kwargs) if func._overloadname.startswith("dtype") else func(*args, **kwargs)
        if func.is_view or name in _NO_KERNEL:
            return out
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and not any(leaf is each for each in given)]
        to_device = here if into is None else into.type == "cuda"
        if to_device:
            for tensor in made:
                memory.allocate(tensor, one.current.name)
        if name in _READS and here:
            _host_reads(given[0], name)
            return out
        if not here and not to_device:
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
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                device().memory.use(leaf, at, name, write=written)

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
