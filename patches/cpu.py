"""Run megatron.core without a GPU: model, DDP, optimizers, clipping, checkpoints and its own schedules, over gloo.

Upstream allocates with ``device="cuda"``, asks ``torch.cuda`` for devices, streams and random states, and compares
``tensor.type()`` with CUDA's names. Where no GPU is available (and only there) this file
- gives every loaded ``megatron.core`` module a view of ``torch`` whose factories and ``cuda`` mean the CPU. The real
  ``torch`` stays as it is, so other code is not affected and no call pays for an interception;
- lets the CPU's one random generator play the part of the GPU's in ``tensor_parallel.random``;
- makes ``Tensor.cuda()`` and ``Module.cuda()`` return the tensor or module itself, ``Tensor.type()`` answer as CUDA would, and
  ``Tensor.record_stream()`` do nothing: the only replacements that reach beyond megatron.core;
- gives the token dispatcher of a mixture of experts the sizes of an all-to-all as numbers;
- switches off torch.compile, which upstream applies to small functions at import and which needs a C++ compiler here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.pipeline.patches import compat

# Of megatron.core: upstream imports these late, from inside functions; they need the view as well, so they are loaded first.
_LATE_MODULES = """
    datasets.blended_megatron_dataset_builder datasets.gpt_dataset
    dist_checkpointing dist_checkpointing.exchange_utils dist_checkpointing.strategies.async_utils
    dist_checkpointing.strategies.filesystem_async dist_checkpointing.strategies.fully_parallel
    dist_checkpointing.strategies.state_dict_saver dist_checkpointing.strategies.torch
    models.common.model_chunk_schedule_plan models.gpt.fine_grained_callables models.gpt.gpt_layer_specs models.gpt.gpt_model
    optimizer rerun_state_machine tensor_parallel.data timers
    pipeline_parallel.combined_1f1b pipeline_parallel.p2p_communication pipeline_parallel.schedules
    transformer.moe.moe_layer transformer.multi_token_prediction transformer.utils
"""

_CPU = torch.device("cpu")


def install() -> None:
    """Redirect megatron.core to the CPU if there is no GPU; do nothing otherwise, or when it is done already."""
    if torch.cuda.is_available() or getattr(torch.Tensor.cuda, "__module__", None) == __name__:
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.disable = True
    patterns = ["models.hybrid.hybrid_layer_specs"] if compat.has_patterns() else []
    for name in _LATE_MODULES.split() + patterns:
        importlib.import_module(f"megatron.core.{name}")
    view = view_of_torch()
    give_view(view, "megatron.core")
    _one_random_generator(view)
    _tensor_methods()
    _numbers_of_tokens()


def give_view(view: types.ModuleType, *packages: str) -> None:
    """Put a view of torch in the place of torch, in all loaded modules of some packages."""
    for name, module in list(sys.modules.items()):
        if name.startswith(packages) and getattr(module, "torch", None) is torch:
            module.torch = view  # type: ignore[attr-defined]


def view_of_torch() -> types.ModuleType:
    """A module that is torch, but for ``cuda`` and the factories that take ``device=``."""
    view = _Module("torch", torch)
    for name in ("arange", "empty", "empty_like", "full", "ones", "ones_like", "rand", "randn", "tensor", "zeros", "zeros_like"):
        setattr(view, name, _on_cpu(getattr(torch, name)))
    view.cuda = _cpu_view_of_cuda()  # type: ignore[attr-defined]
    for kind in ("Byte", "Int", "Long", "Half", "BFloat16", "Float"):
        setattr(view.cuda, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))  # type: ignore[attr-defined]
    return view


def _cpu_view_of_cuda() -> types.ModuleType:
    """``torch.cuda`` for one device that is the CPU: work is done when the call returns, so streams and events are empty."""
    cuda = _Module("torch.cuda", torch.cuda)
    vars(cuda).update(
        dict.fromkeys(("set_device", "synchronize", "empty_cache", "set_stream"), _nothing),
        **dict.fromkeys(("Stream", "current_stream", "default_stream"), _Stream),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_: 0),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
        current_device=lambda: _CPU,
        device_count=lambda: 1,
        Event=_Event,
        stream=lambda _stream: contextlib.nullcontext(),
        is_current_stream_capturing=lambda: False,
        memory_stats=lambda *_: {},
        nvtx=_no_ranges(),
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    )
    return cuda


def _no_ranges() -> types.ModuleType:
    """``torch.cuda.nvtx``: no profiler looks at ranges."""
    nvtx = _Module("torch.cuda.nvtx", torch.cuda.nvtx)
    vars(nvtx).update(range_push=_nothing, range_pop=_nothing, range=lambda *_, **__: contextlib.nullcontext())
    return nvtx


def _one_random_generator(view: types.ModuleType) -> None:
    """The CPU's generator is the device's; upstream's separate bookkeeping of "the CPU state" has nothing left to keep."""
    random = compat.module("megatron.core.tensor_parallel.random")
    no_state = torch.zeros(0, dtype=torch.uint8)
    one_generator = _Module("torch", view)
    one_generator.get_rng_state = lambda: no_state  # type: ignore[attr-defined]
    one_generator.set_rng_state = _nothing  # type: ignore[attr-defined]
    random.torch = one_generator  # type: ignore[attr-defined]
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)  # type: ignore[attr-defined]


def _tensor_methods() -> None:
    original_type = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        return original_type(self).replace("torch.", "torch.cuda.", 1)

    def cuda(self: Any, *_: Any, **__: Any) -> Any:
        return self

    torch.Tensor.type = type_  # type: ignore[assignment, method-assign]
    torch.Tensor.cuda = cuda  # type: ignore[method-assign]
    torch.Tensor.record_stream = _nothing  # type: ignore[assignment, method-assign]
    torch.nn.Module.cuda = cuda  # type: ignore[assignment, method-assign]


def _numbers_of_tokens() -> None:
    """Upstream makes the sizes of an all-to-all plain numbers as it fetches them from the GPU; here they need just that."""
    dispatcher = compat.module("megatron.core.transformer.moe.token_dispatcher")

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = move  # type: ignore[attr-defined]


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # there is no GPU to copy to
        return factory(*args, **kwargs)

    return on_cpu


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Module(types.ModuleType):
    """A module with the contents of another, of which some names are then replaced."""

    def __init__(self, name: str, original: types.ModuleType) -> None:
        super().__init__(name)
        self.__dict__.update({key: value for key, value in vars(original).items() if not key.startswith("__")})
        self._original = original

    def __getattr__(self, name: str) -> Any:  # only for what the original creates lazily
        return getattr(self._original, name)


class _Stream:
    """A stream whose work is always done."""

    __init__ = __exit__ = wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self


class _Event:
    """An event that has always happened."""

    __init__ = record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True
