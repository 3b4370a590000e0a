"""Local experts in one grouped product per layer (GroupedMLP): its backward splits into B and W like a linear's.

``gmm`` takes the place of the package grouped_gemm's function of that name (``patches/moe_experts.py``). For a weight that
``split_weights`` has prepared, its backward makes the weight gradient a task of W. Without the package, a product for each
expert gives the same result, more slowly, on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.pipeline.backward import weight_tasks

try:
    import grouped_gemm
except ImportError:
    grouped_gemm = None


def gmm(tokens: torch.Tensor, weights: torch.Tensor, tokens_per_expert: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
    """Every expert's tokens times its weights.

    Args:
        tokens: (tokens, inputs), sorted by expert.
        weights: (experts, inputs, outputs), a view of the parameter.
        tokens_per_expert: how many tokens each expert has.
        trans_b: False, as GroupedMLP says.

    Returns:
        (tokens, outputs)
    """
    assert not trans_b
    result: torch.Tensor = _GroupedProduct.apply(tokens, weights, tokens_per_expert)
    return result


def patched_forward(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """GroupedMLP's forward, which also submits the weight tasks of microbatches of which no token comes to this rank's experts.

    Upstream multiplies nothing with all weights, so that they have gradients even so; by ``gmm``, W has them.
    """

    def forward(self: Any, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> Any:
        if tokens.size(0) or not weight_tasks.is_prepared(self.weight1):
            return upstream(self, tokens, tokens_per_expert, probs)
        first = self.weight1.view(self.num_local_experts, self.config.hidden_size, -1)
        second = self.weight2.view(self.num_local_experts, -1, self.config.hidden_size)
        hidden = self.activation_func_with_probs(gmm(tokens, first, tokens_per_expert), probs.unsqueeze(-1))
        return gmm(hidden, second, tokens_per_expert), None

    return forward


@dataclass(eq=False)
class GroupedWeightGradient:
    """The weight gradient of a layer's experts for one microbatch, still to be computed."""

    weight: torch.nn.Parameter
    tokens: torch.Tensor
    grad_output: torch.Tensor
    tokens_per_expert: torch.Tensor

    @property
    def held(self) -> Sequence[torch.Tensor]:
        return self.tokens, self.grad_output

    def prefetch(self) -> None:
        """Nothing to fetch: the tokens are here since the forward sent them to their experts."""

    def run(self) -> None:
        """Add the gradient to the weight's and notify DDP."""
        gradient = _product(self.tokens, self.grad_output, self.tokens_per_expert, trans_a=True).view_as(self.weight)
        self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        weight_tasks.notify(self.weight)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weights, tokens_per_expert)
        ctx.parameter = weights._base
        ctx.fused = weight_tasks.runs_fused(ctx.parameter)
        return _product(tokens, weights, tokens_per_expert)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, weights, tokens_per_expert = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        grad_tokens = _product(grad_output, weights, tokens_per_expert, trans_b=True)
        grad_weights = None
        if weight_tasks.is_prepared(ctx.parameter):
            weight_tasks.submit(GroupedWeightGradient(ctx.parameter, tokens, grad_output, tokens_per_expert), ctx.fused)
        elif ctx.needs_input_grad[1]:
            grad_weights = _product(tokens, grad_output, tokens_per_expert, trans_a=True)
        return grad_tokens, grad_weights, None


def _product(
    a: torch.Tensor, b: torch.Tensor, tokens_per_expert: torch.Tensor, trans_a: bool = False, trans_b: bool = False
) -> torch.Tensor:
    """Expert by expert, a times b; with ``trans_a``, both have a row per token and the result is a matrix per expert."""
    if grouped_gemm is not None and a.is_cuda and a.size(0):
        result: torch.Tensor = grouped_gemm.ops.backend.gmm(a, b, tokens_per_expert, trans_a=trans_a, trans_b=trans_b)
        return result
    rows = a.split(tokens_per_expert.tolist())
    if trans_a:
        return torch.stack([left.t() @ right for left, right in zip(rows, b.split(tokens_per_expert.tolist()), strict=True)])
    return torch.cat([left @ (right.t() if trans_b else right) for left, right in zip(rows, b, strict=True)])
