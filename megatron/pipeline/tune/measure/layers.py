"""One transformer layer of a model, built as training builds it, and what its passes take."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron.pipeline.backward import weight_tasks
from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.flags.config import transformer_config
from megatron.pipeline.model.build import build_model
from megatron.pipeline.monitor.memory import ActivationMeter
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.shape.gpt import Work
from megatron.pipeline.tune.measure.clock import MeasureClock, repeated

_WARM_UP = 3  # times: allocators, autotuners and clock rates have settled by then


class Layer:
    """A layer between embedding and output layer of a tiny vocabulary, as ``training`` builds and splits it.

    Args:
        args: ``sizes.layer_flags``. ``parallel_state`` must be initialised, without any model parallelism.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        placement = families.placement("1f1b", 1)
        self._model = build_model(args, transformer_config(args, placement), placement)[0]
        self._layer = unwrap_model(self._model).decoder.layers[0]

    def measure(self, microbatch: int, iterations: int, tell: Callable[[], object]) -> tuple[Work, float]:
        """Median seconds of F, B and W for one microbatch, and the bytes that F keeps.

        Args:
            tell: called after every iteration.

        Raises:
            torch.OutOfMemoryError: the GPU's memory is too small.
        """
        hidden, others = self._inputs(microbatch)
        gradient = torch.randn_like(hidden)
        clock = MeasureClock(hidden.device)

        def passes() -> list[Any]:
            tasks: list[weight_tasks.WeightTask] = []
            source = hidden.detach().requires_grad_()
            marks = [clock.mark()]
            output = self._layer(source, **others)[0]
            marks.append(clock.mark())
            with weight_tasks.deferring(tasks):
                torch.autograd.backward(output, gradient)
            marks.append(clock.mark())
            with torch.no_grad():
                for task in tasks:
                    task.run()
            marks.append(clock.mark())
            tell()
            return marks

        return Work(*repeated(clock, passes, iterations, _WARM_UP)), self._kept(hidden, others)

    def close(self) -> None:
        """Give the memory of the layer back, for the next one."""
        del self._model, self._layer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _inputs(self, microbatch: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Arguments that the model hands its layer in a forward: hidden states, and all else by its name."""
        found: dict[str, Any] = {}

        def note(_: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            found.update(named, **({"hidden_states": given[0]} if given else {}))

        tokens = torch.zeros(microbatch, self._args.seq_length, dtype=torch.long, device=this_device())
        positions = torch.arange(self._args.seq_length, device=tokens.device).expand_as(tokens)
        hook = self._layer.register_forward_pre_hook(note, with_kwargs=True)
        with torch.no_grad():
            self._model(tokens, positions, None)
        hook.remove()
        hidden = found.pop("hidden_states")
        return torch.randn_like(hidden), found

    def _kept(self, hidden: torch.Tensor, others: dict[str, Any]) -> float:
        """Bytes that autograd saves in a forward; the input is one of them."""
        meter = ActivationMeter([*self._layer.parameters(), *_tensors(others)])
        with meter.saving():
            output = self._layer(hidden.detach().requires_grad_(), **others)[0]
        kept = meter.current
        del output
        return float(kept)


def _tensors(values: dict[str, Any]) -> list[torch.Tensor]:
    return [
        one
        for value in values.values()
        for one in (value if isinstance(value, tuple) else (value,))
        if isinstance(one, torch.Tensor)
    ]
