"""Linears whose backward splits: B computes the input gradient, W the weight gradient, later and in any order.

``SplitLinear`` takes the place of megatron-core's autograd function behind ColumnParallelLinear, RowParallelLinear and the
output layer (``patches/tensor_parallel_layers.py``). For a weight that ``split_weights`` has prepared, its backward makes
the weight gradient a ``WeightGradient`` task: run at once, or put into the list that ``deferring`` names.
Another kind of layer joins by making a ``WeightTask`` of its own in its backward.
Everything else of a layer (norms, biases, embeddings, attention) has its gradients finished by B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import layers as upstream_layers
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearWithGradAccumulationAndAsyncCommunication,
    RowParallelLinear,
)
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

try:
    import fused_weight_gradient_mlp_cuda  # NVIDIA's apex; the apex on pip is another package
except ImportError:
    fused_weight_gradient_mlp_cuda = None

_HOOKS = "weight_gradient_hooks"  # attribute of a prepared weight: what to call when it has its gradient of one microbatch


def split_weights(chunk: torch.nn.Module) -> list[str]:
    """Prepare every linear of a model chunk whose backward can be split. Call it before wrapping the chunk in DDP.

    DDP then leaves the readiness of these weights to ``register_wgrad_accumulation_and_reduce_hooks`` of their modules,
    provided its config says ``delay_wgrad_compute``.

    Returns:
        What runs fused although it has a weight matrix: ``"name: reason"`` for every such module.

    Raises:
        RuntimeError: ``patches.install()`` has not run, so that no backward would know of this.
    """
    if upstream_layers.LinearWithGradAccumulationAndAsyncCommunication is not SplitLinear:
        raise RuntimeError("megatron-core's linears are not patched: call megatron.pipeline.patches.install() first")
    fused = []
    uses: dict[torch.nn.Parameter, int] = {}
    for module in chunk.modules():
        for parameter in module.parameters(recurse=False):
            uses[parameter] = uses.get(parameter, 0) + 1
    for name, module in chunk.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, ColumnParallelLinear) and weight is None:
            # Tied to the embedding of the same stage: autograd adds both gradients before either is accumulated,
            # and taking the linear's apart would change the order of that sum.
            fused.append(f"{name}: shares its weight with the embedding of this stage")
        elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            if not weight.requires_grad:
                continue
            if uses[weight] > 1:
                fused.append(f"{name}: shares its weight with another module of this stage")
            else:
                _prepare(weight)
        elif isinstance(module, GroupedMLP):
            for parameter in module.parameters(recurse=False):
                _prepare(parameter)
        elif isinstance(module, torch.nn.Linear):
            fused.append(f"{name}: {type(module).__name__} is not a megatron-core linear")
    return fused


def _prepare(weight: torch.nn.Parameter) -> None:
    weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
    setattr(weight, _HOOKS, [])


def is_prepared(weight: torch.Tensor | None) -> bool:
    """Whether W computes the gradient of a weight."""
    return hasattr(weight, _HOOKS)


def register_hook(module: torch.nn.Module, hook: Callable[[], None]) -> None:
    """Call ``hook`` whenever a microbatch has added its gradient to a prepared weight of a module.

    DDP asks for each weight without saying for which, in the order of the module's parameters.
    """
    prepared = [getattr(weight, _HOOKS) for weight in module.parameters(recurse=False) if is_prepared(weight)]
    min(prepared, key=len).append(hook)


def notify(weight: torch.nn.Parameter) -> None:
    """Tell whoever waits for a prepared weight that it has its gradient of one microbatch.

    Raises:
        RuntimeError: the weight is in DDP's buffers, but nobody waits.
    """
    hooks = getattr(weight, _HOOKS)
    if not hooks and hasattr(weight, "main_grad"):
        raise RuntimeError(
            "a weight prepared by split_weights is in DDP's buffers, but DDP does not wait for its gradients: "
            "wrap the model with DistributedDataParallelConfig(delay_wgrad_compute=True, ...), after split_weights"
        )
    for hook in hooks:
        hook()


class WeightTask(Protocol):
    """What W does for one layer and one microbatch."""

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """The tensors kept alive until the task has run."""

    def prefetch(self) -> None:
        """Start what communication the task needs, so that it overlaps the work before it."""

    def run(self) -> None:
        """Compute the gradient and tell whoever waits for it. Once."""


class WeightGradient:
    """The weight gradient of one linear for one microbatch, still to be computed. Holds what it needs, nothing else.

    Under sequence parallelism the input is kept as this rank's shard; ``prefetch`` starts gathering the rest.
    """

    def __init__(
        self,
        weight: torch.nn.Parameter,
        input: torch.Tensor,
        grad_output: torch.Tensor,
        gather_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        self._weight = weight
        self._input = input
        self._grad_output = grad_output
        self._gather_group = gather_group
        self._gathered: torch.Tensor | None = None
        self._gathering: torch.distributed.Work | None = None

    @property
    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._input, self._grad_output

    def prefetch(self) -> None:
        if self._gather_group is None or self._gathering is not None:
            return
        size = self._input.size(0) * self._gather_group.size()
        self._gathered = self._input.new_empty((size, *self._input.shape[1:]))
        self._gathering = torch.distributed.all_gather_into_tensor(
            self._gathered, self._input.contiguous(), group=self._gather_group, async_op=True
        )

    def run(self) -> None:
        """Add the gradient to ``main_grad`` (to ``grad`` where there is no DDP) and tell whoever waits for the weight."""
        self.prefetch()
        total_input = self._input
        if self._gathering is not None:
            self._gathering.wait()
            assert self._gathered is not None
            total_input = self._gathered
        grad_output, total_input = prepare_input_tensors_for_wgrad_compute(self._grad_output, total_input)
        _accumulate(self._weight, grad_output, total_input)
        notify(self._weight)


def _accumulate(weight: torch.nn.Parameter, grad_output: torch.Tensor, total_input: torch.Tensor) -> None:
    """weight's gradient += grad_output^T @ total_input."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is not None and grad_output.is_cuda:
        # One kernel that accumulates in main_grad's precision, in place.
        if fused_weight_gradient_mlp_cuda is not None:
            fused = (
                fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
                if main_grad.dtype == torch.float32
                else fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16
            )
            fused(total_input, grad_output, main_grad)
        elif main_grad.dtype == grad_output.dtype:
            main_grad.addmm_(grad_output.t(), total_input)
        else:
            torch.addmm(main_grad, grad_output.t(), total_input, out_dtype=main_grad.dtype, out=main_grad)
        # DDP's hook wants to see a gradient; this one has a single element of storage and is not added.
        weight.grad = weight.new_zeros(1).expand(weight.shape)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return
    # On the CPU the sum must round as megatron-core's own does: a product, then an addition (made by DDP's hook).
    gradient = grad_output.t().matmul(total_input)
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


# Where backward puts weight gradients, while ``deferring`` says so. A plain variable because autograd may call backward
# from a thread of its own while the thread that set this waits for it.
_deferred: list[WeightTask] | None = None


@contextmanager
def deferring(tasks: list[WeightTask]) -> Iterator[None]:
    """Within this context, backward appends weight tasks to ``tasks`` instead of running them."""
    global _deferred
    outer, _deferred = _deferred, tasks
    try:
        yield
    finally:
        _deferred = outer


def submit(task: WeightTask) -> None:
    """Run a task now, or leave it to W if this backward is a B."""
    if _deferred is None:
        task.run()
    else:
        _deferred.append(task)


class SplitLinear(torch.autograd.Function):
    """megatron-core's linear with its weight gradient as a task. Same arguments, same numbers."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.nn.Parameter, *rest: Any) -> torch.Tensor:
        # A forward inside a backward is a recomputation. What it computes lives until B ends; a W that ran later would keep
        # alive what recomputation was asked to free, so such a layer runs fused.
        ctx.recomputed = torch._C._current_graph_task_id() != -1
        ctx.weight = weight  # the parameter itself: saved-tensor hooks would hand back a copy without its attributes
        return LinearWithGradAccumulationAndAsyncCommunication.forward(ctx, input, weight, *rest)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input, _), weight = ctx.saved_tensors, ctx.weight
        if not is_prepared(weight) or ctx.grad_output_buffer is not None:
            return LinearWithGradAccumulationAndAsyncCommunication.backward(ctx, grad_output)
        task = WeightGradient(weight, input, grad_output, ctx.tp_group if ctx.sequence_parallel else None)
        deferred = _deferred is not None and not ctx.recomputed
        if not deferred:
            task.prefetch()  # before the input gradient's product, which hides it

        grad_input = grad_output.matmul(weight)
        reduction = None
        if ctx.allreduce_dgrad:
            reduction = torch.distributed.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
        elif ctx.sequence_parallel:
            whole, grad_input = grad_input, torch.empty_like(input, requires_grad=False)
            reduction = torch.distributed.reduce_scatter_tensor(grad_input, whole, group=ctx.tp_group, async_op=True)

        # Behind the reduction: the weight gradient, or its bookkeeping, and the bias.
        if deferred:
            submit(task)
        else:
            task.run()
        grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        if reduction is not None:
            reduction.wait()
        return (grad_input, None, grad_bias, *(None for _ in ctx.needs_input_grad[3:]))
