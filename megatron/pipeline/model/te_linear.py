"""Transformer Engine's linears under a schedule: B leaves their weight gradients in their own stores, W calls ``backward_dw``.

Written against the public interface of transformer_engine.pytorch from 2.8 on. 2.3 brought ``delay_wgrad_compute`` and
``backward_dw`` to Linear, LayerNormLinear, LayerNormMLP and GroupedLinear; 2.7 brought the mark ``skip_backward_post_hook``
and ``register_wgrad_accumulation_and_reduce_hooks``, by which megatron-core's DDP waits for delayed gradients; from 2.8 on
each ``backward_dw`` writes a gradient even if there is one. A module keeps the work of its backwards in the order they ran,
and ``backward_dw`` does the oldest: W must run in the order of B, as the specification of schedules demands.

The interface is made for a ``backward_dw`` right after each backward. What later ones would stumble over is the parameters'
``grad``: a backward may leave the bias's gradient there (the bias is added outside of the module, or FP8), or a stand-in for
one that is to go straight into ``main_grad``. ``backward_dw`` and DDP's hook then want to find one for every microbatch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_te_version
from megatron.pipeline.patches import unsupported

from megatron.pipeline.backward import weight_tasks
from megatron.pipeline.backward.linear import mark_accumulated

OLDEST = "2.8"
_DELAYED = re.compile(r"(weight|bias)\d*")  # a norm's parameters have other names


def is_installed() -> bool:
    """Tell whether there is a Transformer Engine; where there is none, megatron-core says None, or from 0.19 on 0.0.0."""
    return str(get_te_version() or "0.0.0") != "0.0.0"


def check_version() -> None:
    """Refuse a Transformer Engine whose backward cannot be split under DDP.

    Raises:
        ValueError: not installed, or older than ``OLDEST``.
    """
    from packaging.version import Version

    if not is_installed() or get_te_version() < Version(OLDEST):
        found = f"{get_te_version()} is installed" if is_installed() else "it is not installed"
        raise ValueError(
            f"splitting the backward of Transformer Engine's layers needs transformer-engine >= {OLDEST}, and {found}: "
            f"pip install 'transformer-engine[pytorch]>={OLDEST}', or take --transformer-impl local"
        )


def delay_weight_gradients(config: TransformerConfig) -> None:
    """Have modules of Transformer Engine that are built with ``config`` from here on leave their weight gradients to W.

    It sets ``config.delay_wgrad_compute``, for which TransformerConfig's constructor demands the overlap of expert-parallel
    communication: upstream's only use of it, and not ours.

    Raises:
        ValueError: as ``check_version``, or ``unsupported.UNSUPPORTED`` has a setting, such as ``tp_comm_overlap``.
    """
    check_version()
    unsupported.refuse(config)
    config.delay_wgrad_compute = True


def check_quantized(settings: Any, offloads: bool, steps_ahead: bool, reruns: bool) -> None:
    """Refuse FP8 together with what takes every tensor for plain memory, or every forward for the same as before.

    Args:
        settings: a TransformerConfig, or Megatron-LM's flags.
        offloads: activations are copied to host memory by the schedule.
        steps_ahead: optimizer steps may be taken back.
        reruns: the schedule runs forwards again, in passes R.

    Raises:
        ValueError: says what to use instead.
    """
    if not getattr(settings, "fp8", None):
        return
    if reruns and getattr(settings, "fp8_recipe", None) == "delayed":
        raise ValueError(
            "--fp8-recipe delayed with a schedule that runs forwards again (R): their scales would be those of later "
            "microbatches: give --fp8-recipe tensorwise, mxfp8 or blockwise, or a schedule without R and --recompute-granularity"
        )
    if offloads:
        raise ValueError(
            "--offload with FP8: it would move Transformer Engine's FP8 weights with every microbatch: leave --offload "
            "out and recompute activations (--recompute-granularity), or train in --bf16"
        )
    if steps_ahead:
        raise ValueError(
            "--post-validation with FP8: it takes steps back, and would leave Transformer Engine's scales as they are: leave "
            "--post-validation out, or train in --bf16"
        )


def is_engines(module: torch.nn.Module) -> bool:
    """Tell whether a module is a linear of Transformer Engine."""
    return hasattr(module, "wgrad_store")


def is_delayed(module: torch.nn.Module) -> bool:
    """Tell whether a module is Transformer Engine's, and built to have ``backward_dw`` called."""
    store: Any = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


def prepare(module: torch.nn.Module) -> None:
    """Make a ``DelayedGradient`` of every backward of a module that is delayed, and have W add its product to ``main_grad``.

    Transformer Engine's products do that without apex, for which ``config.gradient_accumulation_fusion`` asks: on its own, a W
    would round a gradient to the weight's precision and DDP would add it, and GroupedLinear keeps such gradients from B to W.
    """
    module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
    delayed = [parameter for name, parameter in module.named_parameters(recurse=False) if _DELAYED.fullmatch(name)]
    for parameter in delayed:  # marked already, but megatron-core makes biases anew under --use-cpu-initialization
        parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]
    module.register_forward_pre_hook(partial(_mark_input, delayed))


class DelayedGradient:
    """The weight gradient of a module for one microbatch, whose backward has just run.

    Args:
        delayed: the module's weights and biases that are left to W, unless they are frozen.
    """

    def __init__(self, module: Any, delayed: Sequence[torch.nn.Parameter]) -> None:
        self._module = module
        parameters = [parameter for parameter in delayed if parameter.requires_grad]
        self._weights = [parameter for parameter in parameters if parameter.dim() > 1]
        self._bias_gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.dim() == 1]
        for parameter in parameters:
            parameter.grad = None  # of a weight it is a stand-in, or nothing: saved-tensor hooks hide the weight from 2.8 to 2.14
        stored = module.wgrad_store.context.queue
        self._stored = stored[-1] if stored else None

    @property
    def held(self) -> Iterator[torch.Tensor]:
        """The tensors that the module's store keeps for it, without what a product is added to."""
        main_grads = {weight.main_grad.untyped_storage().data_ptr() for weight in self._weights if hasattr(weight, "main_grad")}
        for one in _tensors(self._stored[:1] if self._stored else []):
            if one.untyped_storage().data_ptr() not in main_grads:
                yield one

    def prefetch(self) -> None:
        """Nothing to fetch: under sequence parallelism the module's store has the whole input."""

    def run(self) -> None:
        """Add the gradients of the oldest backward to ``main_grad`` and notify DDP.

        Raises:
            RuntimeError: DDP does not wait for them.
        """
        if not self._module.wgrad_accumulation_and_reduce_hooks:
            raise RuntimeError(weight_tasks.DDP_DOES_NOT_WAIT)
        self._stored = None  # to be let go of by the store
        for weight in self._weights:
            mark_accumulated(weight)
        for bias, gradient in self._bias_gradients:
            bias.grad = gradient
        self._bias_gradients.clear()
        self._module.backward_dw()


def _tensors(stored: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own in an entry of a store: in lists, and those that a quantized tensor is made of."""
    if isinstance(stored, (list, tuple)):
        for one in stored:
            yield from _tensors(one)
    elif type(stored) in (torch.Tensor, torch.nn.Parameter):
        yield stored
    else:
        yield from (part for part in getattr(stored, "__dict__", {}).values() if type(part) is torch.Tensor)


def _mark_input(
    delayed: Sequence[torch.nn.Parameter], module: torch.nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    if not torch.is_grad_enabled():
        return None
    hidden, *rest = inputs
    if not hidden.requires_grad:  # behind frozen layers; the backward is to come by here even so
        hidden = hidden.detach().requires_grad_()
    return _AfterBackward.apply(hidden, module, delayed), *rest


class _AfterBackward(torch.autograd.Function):
    """The identity, on a module's input: its backward runs when the module's has run, and all of its ``grad`` are there."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, module: torch.nn.Module, delayed: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        ctx.module, ctx.delayed = module, delayed
        ctx.fused = weight_tasks.runs_fused(*delayed)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight_tasks.submit(DelayedGradient(ctx.module, ctx.delayed), ctx.fused)
        return gradient, None, None
