"""Transformer Engine's split backward: its contract on a module with the same interface, and its own layers where they are."""

from __future__ import annotations

from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer import TransformerConfig
from model.backward_orders import run_backwards
from packaging.version import Version
from pool import Pool

from megatron.pipeline.backward.weight_tasks import WeightTask, check_no_gradient_is_lost, deferring
from megatron.pipeline.model import te_linear
from megatron.pipeline.model.split_linear import split_weights
from megatron.pipeline.planner.combinations.rows import SCHEDULES
from megatron.pipeline.planner.combinations.table import Facts

SIZE, MICROBATCHES = 8, 3
OUTSIDE, IN_W, IN_B = "added outside of the module", "its gradient by W", "its gradient by B, as with FP8"


class Store:
    """What a module of Transformer Engine keeps from B to W, oldest first."""

    def __init__(self, delayed: bool) -> None:
        self.delayed = delayed
        self.context: Queue[Any] = Queue()

    def delay_wgrad_compute(self) -> bool:
        return self.delayed


class EngineLinear(torch.nn.Module):
    """A linear that treats gradients as Transformer Engine 2.8's does, ``fused`` as with gradient accumulation fusion."""

    def __init__(self, delayed: bool, fused: bool, bias: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
        self.bias = torch.nn.Parameter(torch.randn(SIZE))
        self.fuse_wgrad_accumulation, self.bias_is = fused, bias
        self.tp_size, self.parallel_mode, self.sequence_parallel = 1, None, False
        self.wgrad_store = Store(delayed)
        self.wgrad_accumulation_and_reduce_hooks: list[Any] = []
        if delayed:  # the bias, too, but megatron-core makes it anew under --use-cpu-initialization
            self.weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inside = None if self.bias_is == OUTSIDE else self.bias
        result: torch.Tensor = EngineFunction.apply(hidden, self.weight, inside, self)
        return result + self.bias if inside is None else result

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def gradients(self, hidden: torch.Tensor, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight: Any = self.weight
        gradient = grad_output.t() @ hidden
        if self.fuse_wgrad_accumulation:
            weight.main_grad.add_(gradient)
            gradient = torch.full_like(gradient, torch.nan)  # there to be seen, not to be added
        return gradient, grad_output.sum(0) if self.bias_is == IN_W else None

    def backward_dw(self) -> None:
        tensors, product = self.wgrad_store.context.get()
        gradient, bias_gradient = product(*tensors)
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = gradient
        if self.bias.grad is None:
            self.bias.grad = bias_gradient.to(self.bias.dtype)  # type: ignore[union-attr]
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class EngineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: Any, bias: Any, module: EngineLinear) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.module = module
        result = hidden @ weight.t()
        return result if bias is None else result + bias

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden, weight), module = ctx.saved_tensors, ctx.module
        gradient = bias_gradient = None
        if module.wgrad_store.delayed:
            module.wgrad_store.context.put([[hidden, grad_output], module.gradients])
            gradient = torch.full_like(weight, torch.nan) if module.fuse_wgrad_accumulation else None
        else:
            gradient, bias_gradient = module.gradients(hidden, grad_output)
        if module.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
        elif module.fuse_wgrad_accumulation:  # hooks have hidden the parameter
            gradient = None
        if module.bias_is == IN_B:
            bias_gradient = grad_output.sum(0)
        return grad_output @ weight, gradient, bias_gradient, None


class Model(torch.nn.Module):
    """Two linears, the second recomputed."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = EngineLinear(**options), EngineLinear(**options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.second, False, torch.tanh(self.first(hidden)))
        return result


def build(model: torch.nn.Module, delayed: bool, overlap: bool = True) -> Any:
    """A model under megatron-core's DDP."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    config = TransformerConfig(num_layers=1, hidden_size=SIZE, num_attention_heads=1, use_cpu_initialization=True)
    ddp = DistributedDataParallelConfig(delay_wgrad_compute=delayed, overlap_grad_reduce=overlap)
    return DistributedDataParallel(config, ddp, model)


def gradients(order: str | None, fused: bool, bias: str, fuse_recomputed: bool = False) -> list[list[float]]:
    """Reduced gradients of all parameters and inputs; ``order`` such as "B0 B1 W0 W1", None for modules that do not delay."""
    torch.manual_seed(3)
    module = Model(delayed=order is not None, fused=fused, bias=bias)
    if order is not None:
        assert split_weights(module, fuse_recomputed) == []
    model = build(module, delayed=order is not None)
    torch.manual_seed(torch.distributed.get_rank())
    for _iteration in range(2):  # DDP learns in the first how many gradients to expect
        model.zero_grad_buffer()
        inputs = [torch.randn(4, SIZE).requires_grad_() for _ in range(MICROBATCHES)]
        losses = [model(hidden).square().sum() for hidden in inputs]
        run_backwards(order or "BW0 BW1 BW2", losses, tasks_of_b=1 if fuse_recomputed else 2)
        model.finish_grad_sync()
    parameters: list[Any] = list(module.parameters())
    return [tensor.flatten().tolist() for tensor in (*(p.main_grad for p in parameters), *(x.grad for x in inputs))]


ORDERS = ("BW0 BW1 BW2", "B0 B1 W0 B2 W1 W2", "B0 B1 W0 W1 BW2")


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("bias", [OUTSIDE, IN_W, IN_B])
def test_equals_a_backward_that_delays_nothing(pool: Pool, fused: bool, bias: str) -> None:
    expected = pool.run(2, gradients, None, fused, bias)
    assert all(any(values) for values in expected[0])
    for order in ORDERS:
        assert pool.run(2, gradients, order, fused, bias) == expected, order


def test_recomputed_modules_run_fused_on_request(pool: Pool) -> None:
    expected = pool.run(2, gradients, None, True, OUTSIDE)
    assert pool.run(2, gradients, "B0 B1 W0 B2 W1 W2", True, OUTSIDE, fuse_recomputed=True) == expected


def without_delay() -> str:
    module = EngineLinear(delayed=True, fused=False, bias=OUTSIDE)
    model = build(module, delayed=False, overlap=False)
    split_weights(module)
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(4, SIZE)).sum().backward()
    return str(error.value)


def test_ddp_that_does_not_wait_for_weights_is_an_error(pool: Pool) -> None:
    assert "after split_weights" in pool.run(1, without_delay)[0]


def reports() -> tuple[list[str], list[str], str]:
    frozen = Model(delayed=True, fused=False, bias=OUTSIDE).requires_grad_(False)
    shared = Model(delayed=True, fused=False, bias=OUTSIDE)
    shared.second.weight = shared.first.weight
    with pytest.raises(ValueError, match="cannot delay") as error:
        split_weights(shared)
    return split_weights(Model(delayed=False, fused=False, bias=OUTSIDE)), split_weights(frozen), str(error.value)


def test_says_what_does_not_split(pool: Pool) -> None:
    undelayed, frozen, shared = pool.run(1, reports)[0]
    assert undelayed == [f"{name}: EngineLinear has no backward that splits" for name in ("first", "second")]
    assert frozen == []
    assert shared.startswith("first: Transformer Engine cannot delay")


@pytest.mark.parametrize("version", [None, Version("2.7.0")])
def test_versions_that_cannot_are_refused(monkeypatch: pytest.MonkeyPatch, version: Version | None) -> None:
    monkeypatch.setattr(te_linear, "get_te_version", lambda: version)
    found = "not installed" if version is None else "2.7.0 is installed"
    with pytest.raises(ValueError, match=rf"transformer-engine >= 2\.8, and .*{found}.*--transformer-impl local"):
        te_linear.check_version()


def test_settings_that_exclude_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_linear, "get_te_version", lambda: Version("2.8.0"))
    config = TransformerConfig(num_layers=1, hidden_size=SIZE, num_attention_heads=1)
    te_linear.delay_weight_gradients(config)
    assert config.delay_wgrad_compute
    config.tp_comm_overlap, config.tp_comm_bulk_wgrad = True, False
    with pytest.raises(ValueError, match=r"^--tp-comm-overlap leaves inputs and output gradients of linears in buffers"):
        te_linear.delay_weight_gradients(config)


def test_what_needs_plain_tensors_is_refused_with_quantized_ones() -> None:
    quantized, plain = SimpleNamespace(fp8="e4m3"), SimpleNamespace(fp8=None)
    Facts.of_config(quantized, reruns=True).refuse(SCHEDULES)
    for known, flag in (({"offload": "full"}, "--offload full"), ({"post_validation": True}, "--post-validation")):
        Facts.of_config(plain, **known).refuse(SCHEDULES)
        with pytest.raises(ValueError, match=f"^{flag}.* with FP8.*train in --bf16"):
            Facts.of_config(quantized, **known).refuse(SCHEDULES)


def engine_gradients(order: str | None, bias: bool) -> list[list[float]]:
    """As ``gradients``, of Transformer Engine's own linears, in bfloat16 on a GPU."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16, add_bias_linear=bias
    )
    if order is not None:
        te_linear.delay_weight_gradients(config)
    options: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": bias, "is_expert": False}
    first = TELayerNormColumnParallelLinear(64, 128, gather_output=False, skip_bias_add=False, **options)
    second = TERowParallelLinear(128, 64, input_is_parallel=True, skip_bias_add=True, **options)
    module = torch.nn.ModuleList([first, second])
    if order is not None:
        assert split_weights(module) == []
    ddp = DistributedDataParallelConfig(delay_wgrad_compute=order is not None, overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, module)
    torch.manual_seed(5)
    tasks: dict[int, list[WeightTask]] = {number: [] for number in range(MICROBATCHES)}
    outputs = []
    for _ in range(MICROBATCHES):
        hidden, added = second(first(torch.randn(32, 1, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True))[0])
        outputs.append(hidden if added is None else hidden + added)
    for step in (order or "BW0 BW1 BW2").split():
        kind, number = step[:-1], int(step[-1])
        if kind == "W":
            with torch.no_grad():
                for task in tasks[number]:
                    task.run()
        else:
            loss = outputs[number].float().square().sum()
            if kind == "B":
                with deferring(tasks[number]):
                    loss.backward()
            else:
                loss.backward()
    model.finish_grad_sync()
    parameters: list[Any] = list(module.parameters())
    return [parameter.main_grad.flatten().tolist() for parameter in parameters]


@pytest.mark.cuda
@pytest.mark.parametrize("bias", [False, True])
def test_transformer_engine_itself(nccl: Pool, bias: bool) -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="transformer-engine is not installed")
    expected = nccl.run(1, engine_gradients, None, bias)
    for order in ORDERS:
        assert nccl.run(1, engine_gradients, order, bias) == expected, order


def test_a_gradient_beside_the_modules_own_is_named() -> None:
    """As attention does that takes a weight apart: no backward of the module runs, and so no W."""
    model = Model(delayed=True, fused=True, bias=IN_W)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    check_no_gradient_is_lost(model)
    (torch.randn(2, SIZE) @ model.first.weight.t()).sum().backward()
    with pytest.raises(RuntimeError, match=r"^W never computed first\.weight: the model uses its weight elsewhere"):
        check_no_gradient_is_lost(model)


def test_a_gradient_that_a_module_keeps_for_nobody_is_named() -> None:
    """As fused operations do that call no hook of a module: W does not know that there is something to compute."""
    model = Model(delayed=True, fused=False, bias=IN_W)
    model.first.forward(torch.randn(2, SIZE)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^W never computed first\.weight: "):
        check_no_gradient_is_lost(model)
    model.first.backward_dw()
    check_no_gradient_is_lost(model)
