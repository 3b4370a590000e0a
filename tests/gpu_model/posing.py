"""CPU memory that poses as a GPU's: factories, copies and attributes of tensors, and what every operation reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gpu_model import cuda
from gpu_model.cuda import CUDA, Device, device
from gpu_model.memory import _place
from gpu_model.order import HOST
from gpu_model.watch import Watch, host_reads, making, on_device, shared_methods

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint randn "
    "randn_like randperm tensor zeros zeros_like"
).split()
_NEW = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()
_real_device = torch.Tensor.device

__all__ = ["CUDA", "Device", "device", "pose"]


def pose() -> None:
    """Have this process believe that it has a GPU; for good."""
    import torch._dynamo

    from gpu_model import nccl

    torch._dynamo.config.disable = True  # there is no GPU to compile for
    cuda.install()
    for name in _FACTORIES:
        setattr(torch, name, _made(getattr(torch, name), like=name.endswith("_like")))
    for name in _NEW:
        setattr(torch.Tensor, name, _made(getattr(torch.Tensor, name), like=True))
    _methods()
    nccl.install()
    Watch().__enter__()


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
        before, making.where = making.where, CUDA if where is not None and _is_cuda(where) else _CPU
        try:
            tensor = factory(*args, **kwargs)
        finally:
            making.where = before
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
    shared_methods()
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
        before, making.where = making.where, CUDA if _is_cuda(where) else _CPU
        try:
            return to(self, *rest, **kwargs | {"copy": True})
        finally:
            making.where = before

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
                host_reads(self, method.__name__)
            elif device().memory.home(self) == HOST:
                device().memory.use(self, device().order.launch(HOST), method.__name__, write=False)
            return method(self, *args, **kwargs)

        return reading

    tensor.to, tensor.type, tensor.tolist, tensor.numpy = move, type_, read(tolist), read(numpy)
    tensor.cuda = lambda self, where=None, non_blocking=False, **_: self.to(CUDA, non_blocking=non_blocking)
    tensor.cpu = lambda self, **_: self.to(_CPU)
