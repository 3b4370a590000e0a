"""The second way: tensors without numbers that are on "cuda" for all of torch, its C++ too.

``FakeTensorMode`` makes them, and knows shapes, types and storages. With the device of ``shim.cpp`` autograd's engine runs as it
does on a GPU: on the device's own thread, every node on the stream that was current in its forward, with an event between two
streams. Nothing that the host reads is there, so no read can be missed: each is counted, and answered as if all were well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from gpu_model import cuda
from gpu_model.cuda import device
from gpu_model.memory import _frames
from gpu_model.order import HOST
from gpu_model.shim import EngineDevice
from gpu_model.watch import Watch, host_reads, on_device, shared_methods

_OBJECTS = "all_gather_object broadcast_object_list gather_object scatter_object_list".split()
_FACTORIES = "empty empty_like full ones rand randn tensor zeros zeros_like".split()


def pose(library: Path) -> None:
    """Have this process believe that it has a GPU, on which ``driven`` puts tensors without numbers; for good."""
    import torch._dynamo

    from gpu_model import nccl

    torch._dynamo.config.disable = True
    vars(fake_tensor)["init_gpu_context"] = lambda device: None  # by which a torch that is built for CUDA asks for a GPU
    cuda.install(EngineDevice(library))
    for name in _FACTORIES:
        setattr(torch, name, _pinning(getattr(torch, name)))
    for name in _OBJECTS:  # of the host's, which are there
        setattr(torch.distributed, name, _real(getattr(torch.distributed, name)))
    state = torch.get_rng_state()
    for place in (torch, torch.random, torch.cuda, torch.cuda.random):
        place.get_rng_state = lambda *_, **__: state  # type: ignore[attr-defined]
        place.set_rng_state = lambda *_, **__: None  # type: ignore[attr-defined]
    _methods()
    nccl.install()


class _Mode(FakeTensorMode):
    avoid_device_init = True  # no kernel of the device's runs: numbers go there as a copy of a host's tensor


@contextmanager
def driven(one: EngineDevice, ones_for: str = "") -> Iterator[None]:
    """What torch makes in here has no numbers.

    Args:
        ones_for: a file of the product for which numbers are one, not nothing.

    Raises:
        Exception: the first of what was raised where C++ could not hand it on.
    """
    with patch.object(_Answers, "ones_for", ones_for), _Mode(allow_non_fake_inputs=True), _Watch():
        yield
    if one.failed:
        raise one.failed[0]


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A factory whose ``pin_memory=`` is the model's."""

    @functools.wraps(factory)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        if factory.__name__ == "tensor":  # of tensors in a list: reads them below all modes
            args = tree_map_only(FakeTensor, torch.Tensor.tolist, args)
        tensor = factory(*args, **kwargs)
        if pin_memory:
            device().memory.allocate(tensor, HOST, guarded=True)
        return tensor

    return make


def _methods() -> None:
    shared_methods()
    tensor: Any = torch.Tensor
    storage: Any = torch.UntypedStorage
    real_data, real_address, tolist = storage.data_ptr, tensor.data_ptr, tensor.tolist

    def data_ptr(self: Any) -> int:
        """Fake storages are in memory that is theirs alone, as far as addresses tell."""
        return self._cdata << 20 if self.device.type == "meta" else real_data(self)

    def address(self: Any) -> int:
        if isinstance(self, FakeTensor):
            return int(data_ptr(self.untyped_storage()) + self.storage_offset() * self.element_size())
        return int(real_address(self))

    def to_list(self: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return tolist(self)
        if on_device(self):
            host_reads(self, "tolist")
        return _answers(list(self.shape), self.dtype)

    def swap(parameter: Any, other: Any) -> None:
        """What ``Module.to`` does with tensors that are not plain ones, unless somebody refers to them weakly."""
        parameter.data = other.detach()
        parameter.fake_device = other.fake_device

    storage.data_ptr, tensor.data_ptr, tensor.tolist = data_ptr, address, to_list
    torch.utils.swap_tensors = swap


def _answers(shape: list[int], dtype: torch.dtype) -> Any:
    return [_answers(shape[1:], dtype) for _ in range(shape[0])] if shape else _answer(dtype)


class _Answers:
    ones_for = ""


def _answer(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    number = bool(_Answers.ones_for) and any(name.endswith(_Answers.ones_for) for name, _ in _frames())
    return float(number) if dtype.is_floating_point else int(number)


class _Watch(Watch):
    """Of what computes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # an attribute of a tensor
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return _answer(args[0].dtype) if "scalar" in func._schema.name else True

    def lands(self, tensor: torch.Tensor, here: bool) -> bool:
        return tensor.device.type == "cuda"
