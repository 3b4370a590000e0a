"""megatron-core's linears with a backward in two parts: B computes the input gradient, W the weight gradient.

``SplitLinear`` replaces megatron-core's autograd function of ColumnParallelLinear, RowParallelLinear and the output layer
(``patches/tensor_parallel_layers.py``). For a weight that ``model/split_linear.py`` has prepared, its backward submits a
``WeightGradient`` task; for any other weight it is megatron-core's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

from megatron.pipeline.backward import weight_tasks
from megatron.pipeline.distributed import sequence

try:
    import fused_weight_gradient_mlp_cuda  # NVIDIA's apex; the apex on pip is another package
except ImportError:
    fused_weight_gradient_mlp_cuda = None


@dataclass(eq=False)
class WeightGradient:
    """The weight gradient of one linear for one microbatch, still to be computed. Holds what it needs, nothing else.

    Under sequence parallelism the input of a column-parallel linear and the output gradient of a row-parallel one are kept as
    this rank's shards.
    """

    weight: torch.nn.Parameter
    input: sequence.Part
    grad_output: sequence.Part

    @property
    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.input.kept, self.grad_output.kept

    def prefetch(self) -> None:
        self.input.prefetch()
        self.grad_output.prefetch()

    def run(self) -> None:
        """Add the gradient to ``main_grad`` (to ``grad`` where there is no DDP) and notify DDP."""
        weight_tasks.check_nothing_is_overwritten(self.weight)
        self.prefetch()  # both gathers begin before one is waited for
        accumulate(self.weight, *prepare_input_tensors_for_wgrad_compute(self.grad_output.whole(), self.input.whole()))
        weight_tasks.notify(self.weight)


def accumulate(weight: torch.nn.Parameter, grad_output: torch.Tensor, total_input: torch.Tensor) -> None:
    """Add grad_output^T @ total_input to the weight's gradient: to ``main_grad`` in its precision, or to ``grad``.

    Args:
        weight: [outputs, inputs].
        grad_output: [tokens, outputs].
        total_input: [tokens, inputs].
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        gradient = grad_output.t().matmul(total_input)
        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return
    add_product(main_grad, grad_output, total_input)
    mark_accumulated(weight)


def add_product(main_grad: torch.Tensor, grad_output: torch.Tensor, total_input: torch.Tensor) -> None:
    """Add grad_output^T @ total_input to ``main_grad``, which has its own precision; see ``accumulate`` for shapes."""
    if not grad_output.is_cuda:
        # The sum must round as megatron-core's own does there: a product, then an addition.
        main_grad.add_(grad_output.t().matmul(total_input))
    # Otherwise one kernel that accumulates in main_grad's precision, in place.
    elif fused_weight_gradient_mlp_cuda is not None:
        bits = 32 if main_grad.dtype == torch.float32 else 16
        getattr(fused_weight_gradient_mlp_cuda, f"wgrad_gemm_accum_fp{bits}")(total_input, grad_output, main_grad)
    elif main_grad.dtype == grad_output.dtype:
        main_grad.addmm_(grad_output.t(), total_input)
    else:
        torch.addmm(main_grad, grad_output.t(), total_input, out_dtype=main_grad.dtype, out=main_grad)


def gradient_of(weight: torch.nn.Parameter) -> torch.Tensor:
    """Tensor that gradients are added to: ``main_grad``, or ``grad`` where there is no DDP."""
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is not None:
        return main_grad
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def mark_accumulated(weight: torch.nn.Parameter) -> None:
    """Say that ``main_grad`` has the gradient. DDP's hook wants to see one; this has one element of storage and is not added."""
    weight.grad = stand_in(weight)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def stand_in(weight: torch.nn.Parameter) -> torch.Tensor:
    """The ``grad`` of a weight whose ``main_grad`` has its gradient."""
    return _stand_in(weight.dtype, weight.device, weight.shape)


@cache  # a kernel less for every linear and microbatch; not of the weight, which may be quantized: of that nothing expands
def _stand_in(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype, device=device).expand(shape)


class SplitLinear(torch.autograd.Function):
    """megatron-core's linear with its weight gradient as a task. Same arguments, same numbers."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.nn.Parameter, *rest: Any) -> torch.Tensor:
        ctx.fused = weight_tasks.runs_fused(weight)
        ctx.weight = weight  # the parameter itself: saved-tensor hooks would hand back a copy without its attributes
        return LinearWithGradAccumulationAndAsyncCommunication.forward(ctx, input, weight, *rest)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input, _), weight = ctx.saved_tensors, ctx.weight
        if not weight_tasks.is_prepared(weight) or ctx.grad_output_buffer is not None:
            return LinearWithGradAccumulationAndAsyncCommunication.backward(ctx, grad_output)
        row, reduces = weight_tasks.row_parallel(weight), ctx.allreduce_dgrad or ctx.sequence_parallel
        deferred = weight_tasks.is_deferred(ctx.fused, row is not None, reduces)
        total_input = sequence.Part(input, ctx.tp_group if ctx.sequence_parallel else None)
        task = WeightGradient(weight, total_input, sequence.Part.of(grad_output, row.gathered_by if row and deferred else None))
        if not deferred:
            task.prefetch()  # before the input gradient's product, which hides it

        grad_input = grad_output.matmul(weight)
        reduction: sequence.Waitable | None = None
        if ctx.allreduce_dgrad:
            reduction = torch.distributed.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
        elif ctx.sequence_parallel:
            grad_input, reduction = sequence.reduce_scatter(grad_input, ctx.tp_group)

        # Behind the reduction: the weight gradient, or its bookkeeping, those that wait for a reduction, and the bias.
        weight_tasks.submit(task, ctx.fused, row is not None, reduces)
        grad_bias = grad_output.flatten(0, -2).sum(dim=0) if ctx.use_bias else None
        if reduction is not None:
            reduction.wait()
        return (grad_input, None, grad_bias, *(None for _ in ctx.needs_input_grad[3:]))
