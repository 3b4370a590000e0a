"""Transformer Engine's linears under megatron-core's DDP: their gradients when W computes them later, in any order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from model.backward_orders import run_backwards

HIDDEN, INNER, TOKENS, MICROBATCHES = 128, 256, 256, 3  # multiples of the largest block that a scale of FP8 is for
ORDERS = ("BW0 BW1 BW2", "B0 B1 W0 B2 W1 W2", "B0 B1 W0 W1 BW2")
LINEARS = 4
PLAIN, METERED, OFFLOADED, RECOMPUTED = "plain", "metered", "offloaded", "recomputed"
RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise")  # as megatron-core's --fp8-recipe has them


class Linears(torch.nn.Module):
    """A norm and a linear, a linear, experts, and a linear whose bias is added outside of it."""

    def __init__(self, delayed: bool, fused: bool, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options: dict[str, Any] = {
            "params_dtype": dtype,
            "device": "cpu",
            "delay_wgrad_compute": delayed,
            "fuse_wgrad_accumulation": fused,
        }
        self.first = te.LayerNormLinear(HIDDEN, INNER, bias=bias, **options)
        self.second = te.Linear(INNER, HIDDEN, bias=bias, **options)
        self.experts = te.GroupedLinear(2, HIDDEN, HIDDEN, bias=bias, **options)
        self.last = te.Linear(HIDDEN, HIDDEN, bias=bias, return_bias=True, **options)

    def forward(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        inner = self.experts(torch.tanh(self.second(self.first(hidden))), rows)
        result, bias = self.last(inner)
        whole: torch.Tensor = result if bias is None else result + bias
        return whole


def build(delayed: bool, bias: bool = True, dtype: torch.dtype = torch.float32, fused: bool = False, experts: bool = True) -> Any:
    """Linears under DDP with overlapping reductions and main gradients in float32, split if they delay."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from megatron.pipeline.model.split_linear import split_weights

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    torch.manual_seed(3)
    module = Linears(delayed, fused, bias, dtype)
    if delayed:
        assert split_weights(module) == []
    config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, use_cpu_initialization=True)
    ddp = DistributedDataParallelConfig(delay_wgrad_compute=delayed, overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp, module)


def gradients(
    order: str | None, bias: bool, dtype: torch.dtype, saving: str = PLAIN, recipe: str | None = None, weights: bool = False
) -> list[str]:
    """Digests of the reduced gradients of all parameters, then of those of inputs, after two iterations.

    Args:
        order: of the backwards; None: of linears that do not delay, and that add to ``main_grad`` in their products.
        saving: what happens to what autograd saves.
        recipe: one of ``RECIPES``, by which products are of numbers in FP8.
        weights: weights are kept in FP8.
    """
    with _weights_of(recipe if weights else None):
        model = build(order is not None, bias, dtype, fused=order is None)
    torch.manual_seed(torch.distributed.get_rank())
    for _iteration in range(2):  # DDP learns in the first how many gradients to expect
        model.zero_grad_buffer()
        inputs = [torch.randn(TOKENS, HIDDEN, dtype=dtype).requires_grad_() for _ in range(MICROBATCHES)]
        losses = []
        with _saved(model, saving) as (saves, bring_back):
            for number, hidden in enumerate(inputs):
                rows = [number * 128, TOKENS - number * 128]  # no token for the first expert in the first microbatch
                with saves():
                    losses.append(_forward(model, hidden, rows, saving == RECOMPUTED, recipe).float().square().sum())
            bring_back()
            run_backwards(order or "BW0 BW1 BW2", losses, tasks_of_b=LINEARS)
        model.finish_grad_sync()
    _forget_scales()
    parameters: list[Any] = list(model.parameters())
    found = [*(p.main_grad for p in parameters), *(x.grad for x in inputs)]
    assert all(one.isfinite().all() and one.any() for one in found)
    return [hashlib.sha256(one.float().numpy().tobytes()).hexdigest() for one in found]


def _forward(model: Any, hidden: torch.Tensor, rows: list[int], recomputed: bool, recipe: str | None) -> torch.Tensor:
    import transformer_engine.pytorch as te
    from megatron.core.tensor_parallel import checkpoint

    if recipe is None:
        result: torch.Tensor = checkpoint(lambda one: model(one, rows), False, hidden) if recomputed else model(hidden, rows)
        return result
    with te.fp8_autocast(enabled=True, fp8_recipe=_recipe(recipe)):
        return te.checkpoint(model, hidden, rows) if recomputed else model(hidden, rows)  # type: ignore[no-any-return]


def _recipe(name: str) -> Any:
    from transformer_engine.common import recipe

    if name == "delayed":
        return recipe.DelayedScaling(amax_history_len=2)
    names = {"tensorwise": "Float8CurrentScaling", "mxfp8": "MXFP8BlockScaling", "blockwise": "Float8BlockScaling"}
    return getattr(recipe, names[name])()


def _forget_scales() -> None:
    """Transformer Engine keeps those of delayed scaling for the process, and updates them in each later backward."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def _weights_of(recipe: str | None) -> AbstractContextManager[Any]:
    import transformer_engine.pytorch as te

    return nullcontext() if recipe is None else te.fp8_model_init(enabled=True, recipe=_recipe(recipe))  # type: ignore[no-any-return]


@contextmanager
def _saved(model: torch.nn.Module, saving: str) -> Iterator[tuple[Callable[[], AbstractContextManager[Any]], Callable[[], None]]]:
    """A context for each forward, and what to call before the backwards."""
    from runtime.offloaded import move, stores

    from megatron.pipeline.monitor.memory import ActivationMeter
    from megatron.pipeline.runtime.offload.copy_streams import ThreadCopyStreams
    from megatron.pipeline.runtime.offload.host_memory import HostPool

    if saving == METERED:
        meter = ActivationMeter(model.parameters())
        with meter.observing():
            yield meter.saving, lambda: None
        assert meter.peak > 0
    elif saving == OFFLOADED:
        make = stores(model, ThreadCopyStreams(), HostPool(None, pinned=False))
        made: list[Any] = []

        def capture() -> AbstractContextManager[Any]:
            made.append(make())
            context: AbstractContextManager[Any] = made[-1].capture()
            return context

        def bring_back() -> None:
            for store in made:
                move(store)

        yield capture, bring_back
        assert made
    else:
        yield nullcontext, lambda: None


def counted_bytes() -> tuple[int, int, int]:
    """What the meter of activations counts after a forward, between B and W, and after W."""
    from megatron.pipeline.backward.weight_tasks import WeightTask, deferring
    from megatron.pipeline.monitor.memory import ActivationMeter, hold

    model = build(delayed=True, dtype=torch.bfloat16)
    meter = ActivationMeter(model.parameters())
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    tasks: list[WeightTask] = []
    with meter.observing():
        with meter.saving():
            loss = model(hidden, [128, 128]).float().square().sum()
        of_forward = meter.current
        with deferring(tasks):
            loss.backward()
        kept = [hold(task.held) for task in tasks]
        of_w = meter.current
        with torch.no_grad():
            for task in tasks:
                task.run()
        del task, tasks, kept
    return of_forward, of_w, meter.current
