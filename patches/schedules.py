"""megatron.core.pipeline_parallel.schedules: which function runs an iteration, and how long upstream's own passes take.

The three ``forward_backward_*`` functions: ``get_forward_backward_func`` looks them up when it is called, so rebinding them
reaches every caller, however it imported the getter. Modules that have imported one of them itself get the new one, too. ``use``
puts another in, ``restore`` upstream's back.
``forward_step``, ``backward_step``: upstream's schedules look these up as well; ``record`` measures them, for comparison.
``backward_step`` takes the type of the model up to 0.16: ``backward`` gives it where it is asked for.
``set_current_microbatch``: upstream sets the number on the layers of a chunk. Here the chunk gets it, too: it may have no layers
and yet draws dropout masks, for the embedding.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from megatron.core.utils import get_model_config, unwrap_model
from megatron.pipeline.patches import compat

from megatron.pipeline.planner import Facts, Kind, Pass, interleaved, topics

_FUNCTIONS = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
_STEPS = ("forward_step", "backward_step")
_UPSTREAM = compat.module("megatron.core.pipeline_parallel.schedules")
_ORIGINAL = {name: getattr(_UPSTREAM, name) for name in _FUNCTIONS + _STEPS}
_TAKES_MODEL_TYPE = "model_type" in inspect.signature(_ORIGINAL["backward_step"]).parameters


def install() -> None:
    """Wrap ``set_current_microbatch``. ``use`` and ``record`` replace the functions that run an iteration."""
    compat.wrap(_UPSTREAM, "set_current_microbatch", _tell_chunk)


def _tell_chunk(tell_layers: Any, model: Any, microbatch: int) -> None:
    tell_layers(model, microbatch)
    unwrap_model(model).current_microbatch = microbatch


def use(forward_backward: Callable[..., Any]) -> None:
    """Make ``get_forward_backward_func()`` return a function, for every pipeline size."""
    _put(dict.fromkeys(_FUNCTIONS, forward_backward))


def _put(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Make them the functions of these names in every module that has upstream's, or what stood for them."""
    before = {name: getattr(_UPSTREAM, name) for name in functions}
    if before == functions:
        return
    for module in list(sys.modules.values()):  # a copy, which other threads' imports do not change
        names = getattr(module, "__dict__", {})
        for name, replaced in before.items():
            if names.get(name) is replaced:
                setattr(module, name, functions[name])


def backward(inputs: Any, outputs: Any, gradients: Any, config: Any, model: Any) -> Any:
    """Upstream's ``backward_step`` of one chunk, as every release wants it called."""
    step = _UPSTREAM.backward_step
    if _TAKES_MODEL_TYPE:
        return step(inputs, outputs, gradients, _UPSTREAM.get_model_type(model), config)
    return step(inputs, outputs, gradients, config)


def restore() -> None:
    """Put upstream's functions back; those that run an iteration refuse a model that was built for another placement."""
    _put(_STOCK)


def _of_own_placement(forward_backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward_backward)
    def refusing(*given: Any, model: Any, **options: Any) -> Any:
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        Facts(vars(config), chunks=len(chunks)).refuse(topics.CALLS)
        layout = getattr(config, "pipeline_model_parallel_layout", None)
        homes = getattr(layout, "homes", None)  # ``model/layout.py`` ``PlacementLayout``
        if homes and homes != interleaved(len(homes), len(homes[0])).stages:
            raise ValueError(
                "megatron-core's own schedule would run this model in another order than that of its layers: its chunks are "
                f"placed as another schedule has them, stages {', '.join(map(str, homes[0]))} on the first pipeline rank. Build "
                'the model after install("stock"), or install that schedule again'
            )
        return forward_backward(*given, model=model, **options)

    return refusing


_STOCK = _ORIGINAL | {name: _of_own_placement(_ORIGINAL[name]) for name in _FUNCTIONS}


def record(begin: Callable[[Any], Any]) -> None:
    """Measure the iterations that upstream's own schedules train.

    Args:
        begin: called with the model when such an iteration starts; returns the ``Recorder`` of it.
    """
    _put({name: _recorded(_ORIGINAL[name], begin) for name in _FUNCTIONS})


def _recorded(forward_backward: Callable[..., Any], begin: Callable[[Any], Any]) -> Callable[..., Any]:
    forward_step, backward_step = (_ORIGINAL[name] for name in _STEPS)

    def recorded(**kwargs: Any) -> Any:
        if kwargs.get("forward_only"):
            return forward_backward(**kwargs)
        recorder = begin(kwargs["model"])
        forwarded: dict[int, Pass] = {}  # by the identity of the output, which upstream hands to backward_step

        def recorded_forward(*args: Any, **options: Any) -> Any:
            work = Pass(Kind.F, options["current_microbatch"], options.get("vp_stage") or 0)
            with recorder.measure(work):
                output, num_tokens = forward_step(*args, **options)
            forwarded[id(_first(output))] = work
            return output, num_tokens

        def recorded_backward(input_tensor: Any, output_tensor: Any, *args: Any, **options: Any) -> Any:
            work = forwarded.pop(id(_first(output_tensor)))
            with recorder.measure(work._replace(kind=Kind.BW)):
                return backward_step(input_tensor, output_tensor, *args, **options)

        _UPSTREAM.forward_step, _UPSTREAM.backward_step = recorded_forward, recorded_backward  # type: ignore[attr-defined]
        try:
            return forward_backward(**kwargs)
        finally:
            recorder.end()
            _UPSTREAM.forward_step, _UPSTREAM.backward_step = forward_step, backward_step  # type: ignore[attr-defined]

    return recorded


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) else tensors
