"""Transformer Engine's own Python on a CPU: its compiled module is replaced by operations of torch.

``load(folder)`` imports the unpacked wheel in ``folder``. The wheel's Python runs as it is; what it takes from elsewhere is put
there first:
- ``transformer_engine_torch``, its compiled module, is ``compiled.py``: products and norms in torch. Any other name of it can be
  imported, and raises if it is called;
- its export to ONNX is a module of such names, too;
- triton, if it is not installed, is a module of decorators that change nothing: no kernel of it runs here;
- pydantic's dataclasses, if pydantic is not installed, are those of the standard library;
- ``torch`` is the view of ``patches/cpu.py``, in which a GPU's memory is the CPU's, with a device of NVIDIA's Hopper;
- ``Tensor.is_cuda`` is true for whoever asks from within Transformer Engine;
- megatron-core gathers weights as bytes: gloo, unlike NCCL, takes all that one call gathers, FP8 and 16 bits, for numbers of one
  kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PACKAGE = "transformer_engine"


def load(folder: Path) -> None:
    """Import Transformer Engine from ``folder``, for this process; megatron-core must not be imported yet."""
    assert "megatron.core" not in sys.modules, "megatron-core looks for Transformer Engine when it is imported"
    os.environ.update(NVTE_PROJECT_BUILDING="1", TORCHDYNAMO_DISABLE="1", NVTE_TORCH_COMPILE="0")
    os.environ.update(NVTE_UNFUSED_FP8_UPDATE="1")  # scales of delayed scaling in Python
    sys.path.insert(0, str(folder))
    from engine import compiled

    sys.modules[f"{PACKAGE}_torch"] = compiled
    export = types.ModuleType(f"{PACKAGE}.pytorch.onnx_extensions")
    export.__getattr__ = missing  # type: ignore[method-assign, assignment]
    sys.modules[export.__name__] = export
    _say_that_tensors_are_on_a_gpu()
    with _modules_of_names():
        spec = importlib.util.find_spec(PACKAGE)
        assert spec is not None and spec.loader is not None, f"{folder} has no {PACKAGE}"
        package = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = package
        common = importlib.import_module(f"{PACKAGE}.common")
        common.load_framework_extension = lambda _: None  # type: ignore[attr-defined]
        spec.loader.exec_module(package)
        importlib.import_module(f"{PACKAGE}.pytorch")  # the package itself swallows errors of this import


def see_the_cpu() -> None:
    """Have Transformer Engine's modules see a CPU as their GPU; megatron-core's do since ``patches.install()``."""
    from megatron.pipeline.patches import cpu

    view = cpu.view_of_torch()
    vars(view.cuda).update(
        is_available=lambda: True,
        get_device_properties=lambda *_: types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="CPU"),
        get_device_capability=lambda *_: (9, 0),
        device=lambda _: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
        nvtx=types.SimpleNamespace(
            range=lambda *_: contextlib.nullcontext(), range_push=lambda *_: None, range_pop=lambda *_: None
        ),
    )
    cpu.give_view(view, PACKAGE)
    vars(sys.modules[f"{PACKAGE}.pytorch.distributed"]).update(
        _get_cuda_rng_state=lambda *_, **__: torch.get_rng_state(),
        _set_cuda_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )
    named: Any = torch.Tensor.type  # says "torch.cuda." once too often of tensors in FP8 up to 2.15, which are a GPU's anyway
    torch.Tensor.type = lambda *given, **options: _once(named(*given, **options))  # type: ignore[assignment, method-assign]
    buffers: Any = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    gather = buffers.dist_all_gather_func
    buffers.dist_all_gather_func = lambda whole, part, **how: gather(whole.view(torch.uint8), part.view(torch.uint8), **how)
    for name in ("fp8", "quantization"):  # before 2.9, and after it
        if module := sys.modules.get(f"{PACKAGE}.pytorch.{name}"):
            for recipe in ("mxfp8", "nvfp4", "fp8_block_scaling"):
                if hasattr(module, f"check_{recipe}_support"):
                    setattr(module, f"check_{recipe}_support", lambda: (True, ""))


def _once(answer: Any) -> Any:
    return answer.replace("cuda.cuda.", "cuda.") if isinstance(answer, str) else answer


def _say_that_tensors_are_on_a_gpu() -> None:
    in_memory: Any = torch.Tensor.is_cuda

    def is_cuda(tensor: torch.Tensor) -> bool:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return asking.startswith(f"{PACKAGE}.") or bool(in_memory.__get__(tensor))

    torch.Tensor.is_cuda = property(is_cuda)  # type: ignore[assignment]


@contextlib.contextmanager
def _modules_of_names() -> Iterator[None]:
    """Modules that are not installed and that are imported for their names; they are gone when this ends."""
    finder = _Finder()
    sys.meta_path.append(finder)  # the last: what is installed comes first
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            sys.modules.pop(name, None)


class _Finder:
    def __init__(self) -> None:
        self.made: list[str] = []

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ("triton", "pydantic"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        self.made.append(spec.name)
        module = _Decorators(spec.name)
        if spec.name == "pydantic.dataclasses":
            module.dataclass = dataclasses.dataclass  # type: ignore[attr-defined]
        return module

    def exec_module(self, _module: types.ModuleType) -> None:
        """Its names are made when they are asked for."""


class Missing(type):
    """Of what stands for a name that is not here: its attributes are such names, too; a call raises."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, missing(f"{cls.__name__}.{name}"))
        return getattr(cls, name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the stand-in has no {cls.__name__}")

    def __int__(cls) -> int:
        """Of a member of an enumeration; others have other numbers."""
        return zlib.crc32(cls.__name__.encode())


def missing(name: str) -> Missing:
    """A name that can be imported, stand in annotations, and not be used."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name, (), {})


class _Decorators(types.ModuleType):
    """A module of decorators that return what they decorate, and of what these are given."""

    __version__ = "3.6.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Decorator()


class _Decorator:
    def __getattr__(self, _: str) -> _Decorator:
        return self

    def __call__(self, *args: Any, **__: Any) -> Any:
        return args[0] if len(args) == 1 and isinstance(args[0], types.FunctionType) else self
