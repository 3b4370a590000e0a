"""Transformer Engine's linears under a schedule: B leaves what weight gradients are made from, W makes them.

Written against transformer_engine.pytorch from 2.8 on. 2.3 brought ``delay_wgrad_compute`` to Linear, LayerNormLinear and
GroupedLinear: a backward puts tensors, and the product of them that is the weight gradient, into the module's ``wgrad_store``.
2.7 brought the mark ``skip_backward_post_hook`` and ``register_wgrad_accumulation_and_reduce_hooks``, by which DDP of
megatron-core waits for delayed gradients; from 2.8 on each product writes a gradient even if there is one. W does what the
module's ``backward_dw`` does, without its questions after what does not change. It must run in the order of B, as the
specification of schedules demands: the product of the first microbatch may overwrite ``main_grad``.

The interface is made for a ``backward_dw`` right after each backward. What later ones would stumble over is the parameters'
``grad``: a backward may leave the bias's gradient there (the bias is added outside of the module, or FP8), or a stand-in for
one that is to go straight into ``main_grad``. DDP's hook then wants to find one for every microbatch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from queue import SimpleQueue
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.utils import get_te_version

from megatron.pipeline.backward import weight_tasks
from megatron.pipeline.backward.linear import stand_in
from megatron.pipeline.distributed import sequence
from megatron.pipeline.planner import Facts, topics

OLDEST = "2.8"
_DELAYED = re.compile(r"(weight|bias)\d*")  # a norm's parameters have other names


@cache
def _installed(version: Callable[[], Any]) -> Any:
    """Version of the Transformer Engine, looked for once; where there is none, megatron-core says None, or from 0.19 on 0.0.0."""
    return None if str(found := version() or "0.0.0") == "0.0.0" else found


def is_installed() -> bool:
    """Tell whether there is a Transformer Engine."""
    return _installed(get_te_version) is not None


def release() -> tuple[int, int] | None:
    """The major and the minor number of the Transformer Engine that is installed; None without one."""
    return found.release[:2] if (found := _installed(get_te_version)) else None


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
        ValueError: as ``check_version``, or ``combinations.rows.EXCLUDED`` has a setting, such as ``tp_comm_overlap``.
    """
    check_version()
    Facts.of_config(config).refuse(topics.EXCLUDED)
    config.delay_wgrad_compute = True


def is_engines(module: torch.nn.Module) -> bool:
    """Tell whether a module is a linear of Transformer Engine."""
    return hasattr(module, "wgrad_store")


def is_delayed(module: torch.nn.Module) -> bool:
    """Tell whether a module is Transformer Engine's, and built to have ``backward_dw`` called."""
    store: Any = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


def stay_in_b(module: torch.nn.Module) -> None:
    """Undo, where a module is built to have ``backward_dw`` called, that it is: B computes its weight gradients."""
    if is_delayed(module):
        module.wgrad_store.disable_delay_wgrad_compute()  # type: ignore[operator, union-attr]
        for parameter in module.parameters(recurse=False):
            vars(parameter).pop("skip_backward_post_hook", None)


def prepare(module: torch.nn.Module) -> None:
    """Make a ``DelayedGradient`` of every backward of a module that is delayed, and have W add its product to ``main_grad``.

    Transformer Engine's products do that without apex, for which ``config.gradient_accumulation_fusion`` asks: on its own, a W
    would round a gradient to the weight's precision and DDP would add it, and GroupedLinear keeps such gradients from B to W.
    """
    module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
    delayed = [parameter for name, parameter in module.named_parameters(recurse=False) if _DELAYED.fullmatch(name)]
    for parameter in delayed:  # marked already, but megatron-core makes biases anew under --use-cpu-initialization
        parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]
    module.forward = Marking(module, delayed)


class Marking:
    """The forward of a module whose backward leaves a ``DelayedGradient``, and what all of these have in common.

    Autograd calls the hook of a tensor once its gradient is there: that of the module's input when the module's backward has run,
    and all of its ``grad`` are there.

    Args:
        delayed: the module's weights and biases that are left to W, unless they are frozen when it runs first.

    Attributes:
        kept: what the last backward left, until its hook takes it.
    """

    def __init__(self, module: Any, delayed: Sequence[torch.nn.Parameter]) -> None:
        self._module, self._forward, self._delayed = module, module.forward, delayed
        parallel = module.parallel_mode if module.tp_size > 1 and not hasattr(module, "num_gemms") else None
        self.row = parallel == "row"
        self.kept = module.wgrad_store.context = _KeptByColumns() if parallel == "column" else SimpleQueue()
        # Of the input and the output gradient, the one that all tensor-parallel ranks have in whole.
        self.gathered = (0 if parallel == "column" else 1) if module.sequence_parallel and parallel else None

    @property
    def group(self) -> Any:
        """The tensor-parallel ranks."""
        return self._module.tp_group

    @cached_property
    def notify(self) -> Sequence[Callable[[], None]]:
        """DDP's functions, to be called when ``weights`` and ``biases`` have their gradients.

        Raises:
            RuntimeError: DDP does not wait for them.
        """
        if not self._module.wgrad_accumulation_and_reduce_hooks:
            raise RuntimeError(weight_tasks.DDP_DOES_NOT_WAIT)
        return tuple(self._module.wgrad_accumulation_and_reduce_hooks)

    def notifies_alone(self) -> None:
        """Have Transformer Engine call none of ``notify`` behind a graph of W: it takes the linears of a layer in any order."""
        assert self.notify
        self._module.wgrad_accumulation_and_reduce_hooks = []

    @cached_property
    def weights(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._delayed if parameter.requires_grad and parameter.dim() > 1]

    @cached_property
    def stand_ins(self) -> list[tuple[Any, torch.Tensor]]:
        """The weights, with what ``mark_accumulated`` looks up for each of them."""
        return [(weight, stand_in(weight)) for weight in self.weights]

    @cached_property
    def biases(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self._delayed if parameter.requires_grad and parameter.dim() == 1]

    def stand_in(self) -> None:
        """Put in the place of the weights' gradients what says that ``main_grad`` has them, as megatron-core does.

        Raises:
            RuntimeError: DDP does not wait for them.
        """
        assert self.notify
        for weight, gradient in self.stand_ins:
            weight.grad, weight.grad_added_to_main_grad = gradient, True

    def __call__(self, hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if self.weights and torch.is_grad_enabled() and not is_graph_capturing():
            if not hidden.requires_grad:  # behind frozen layers; the backward is to come by here even so
                hidden = hidden.detach().requires_grad_()
            if hidden.is_leaf:  # autograd may call its hook before the parameters, which are leaves as well, have their ``grad``
                hidden = hidden.view_as(hidden)
            fused = weight_tasks.runs_fused(*self.weights)
            hidden.register_hook(lambda _: weight_tasks.submit(DelayedGradient(self, fused), fused, self.row))
        return self._forward(hidden, *rest, **options)


class _KeptByColumns(SimpleQueue):  # type: ignore[type-arg]
    """Entries of a store of a column-parallel linear: it puts one as soon as the sum of its input's gradient has begun."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        weight_tasks.reduction_begins()


class DelayedGradient:
    """The weight gradient of a module for one microbatch, whose backward has just run.

    Under sequence parallelism it keeps this rank's shard of what the ranks have gathered, and gathers it again in ``prefetch``.
    Of a tensor in FP8 the whole is kept.

    Args:
        fused: it runs at once.
    """

    def __init__(self, module: Marking, fused: bool = False) -> None:
        self._module = module
        self._tensors, self._product = module.kept.get_nowait()
        self._part: sequence.Part | None = None
        cut = module.gathered
        if cut is not None and weight_tasks.is_deferred(fused, module.row) and type(whole := self._tensors[cut]) is torch.Tensor:
            self._part = sequence.Part.of(whole, module.group)
            self._tensors[cut] = self._part.kept
        self._bias_gradients = [_taken(bias) for bias in module.biases] if module.biases else ()
        for weight in module.weights:  # a stand-in, or nothing: saved-tensor hooks hide the weight from 2.8 to 2.14
            weight.grad = None

    @property
    def held(self) -> Iterator[torch.Tensor]:
        """The tensors kept for it, without what a product is added to."""
        weights = self._module.weights
        main_grads = {weight.main_grad.untyped_storage().data_ptr() for weight in weights if hasattr(weight, "main_grad")}
        for one in _tensors(self._tensors):
            if one.untyped_storage().data_ptr() not in main_grads:
                yield one

    def prefetch(self) -> None:
        if self._part is not None:
            self._part.prefetch()

    def run(self) -> None:
        """Add the gradients to ``main_grad`` and notify DDP.

        Raises:
            RuntimeError: DDP does not wait for them.
        """
        module, notify = self._module, self._module.notify
        if self._part is not None:
            self._tensors[module.gathered] = self._part.whole()
        made = self._product(*self._tensors)[1]
        module.stand_in()
        if module.biases:  # of one linear, or of each expert's
            gradients = made if isinstance(made, (list, tuple)) else [made]
            for bias, own, gradient in zip(module.biases, self._bias_gradients, gradients, strict=True):
                bias.grad = gradient.to(bias.dtype) if own is None else own
        for hook in notify:
            hook()


def _taken(bias: torch.nn.Parameter) -> torch.Tensor | None:
    gradient, bias.grad = bias.grad, None
    return gradient


def _tensors(stored: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own in an entry of a store: in lists, and those that a quantized tensor is made of."""
    if isinstance(stored, (list, tuple)):
        for one in stored:
            yield from _tensors(one)
    elif type(stored) in (torch.Tensor, torch.nn.Parameter):
        yield stored
    else:
        yield from (part for part in getattr(stored, "__dict__", {}).values() if type(part) is torch.Tensor)
