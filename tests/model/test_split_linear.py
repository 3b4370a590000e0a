"""The split backward: B and W together are the fused backward, whenever W runs, in any layout."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import tiny_gpt
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.utils import unwrap_model
from model.backward_orders import run_backwards
from pool import Pool

from megatron.pipeline import patches
from megatron.pipeline.backward import linear
from megatron.pipeline.backward.linear import WeightGradient
from megatron.pipeline.backward.weight_tasks import WeightTask, deferring, prepare, register_hook
from megatron.pipeline.distributed import sequence
from megatron.pipeline.distributed.sequence import Part
from megatron.pipeline.model import split_linear
from megatron.pipeline.model.layer_spec import SequenceParallelTorchNorm
from megatron.pipeline.model.split_linear import split_weights
from megatron.pipeline.planner.costmodel.activations import layer_retained
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.runtime.stage_passes import run_weights

SIZE, MICROBATCHES = 8, 3
WIDTH, LENGTH = 32, 32  # of a GPT's layer


def build(split: bool, cls: str, tp: int, ddp: dict[str, Any], **settings: Any) -> Any:
    """One linear under DDP."""
    parallel_state.initialize_model_parallel(tp)
    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=SIZE,
        num_attention_heads=tp,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        **settings,
    )
    options = {"gather_output": False} if cls == "ColumnParallelLinear" else {"input_is_parallel": True, "skip_bias_add": False}

    class Model(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.linear = getattr(tensor_parallel, cls)(
                SIZE, 2 * SIZE, config=config, init_method=config.init_method, bias=True, **options
            )

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.linear(hidden)[0]

    model = Model()
    if split:
        assert split_weights(model) == []
    return DistributedDataParallel(config, DistributedDataParallelConfig(**{"delay_wgrad_compute": split, **ddp}), model)


def gradients(
    order: str | None, cls: str = "ColumnParallelLinear", tp: int = 1, ddp: dict[str, Any] | None = None, **settings: Any
) -> list[list[float]]:
    """Gradients of weight, bias and inputs after some microbatches; ``order`` such as "B0 B1 W0 W1", None for upstream's."""
    model = build(order is not None, cls, tp, ddp or {}, **settings)

    width = SIZE if cls == "ColumnParallelLinear" else SIZE // tp
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(4, 2, width, generator=generator).requires_grad_() for _ in range(MICROBATCHES)]
    losses = [model(hidden).square().sum() for hidden in inputs]
    with model.no_sync():
        run_backwards(order or "BW0 BW1 BW2", losses, tasks_of_b=1)
    linear = model.module.linear
    return [tensor.flatten().tolist() for tensor in (linear.weight.main_grad, linear.bias.main_grad, *(x.grad for x in inputs))]


@pytest.mark.parametrize("order", ["BW0 BW1 BW2", "B0 W0 B1 W1 B2 W2", "B0 B1 B2 W0 W1 W2", "B0 B1 W0 W1 BW2"])
def test_equals_the_fused_backward(pool: Pool, order: str) -> None:
    expected = pool.run(1, gradients, None)
    assert any(value != 0 for value in expected[0][0])
    assert pool.run(1, gradients, order) == expected


def test_w_adds_nothing_before_it_runs(pool: Pool) -> None:
    weight, bias, *inputs = pool.run(1, gradients, "B0 B1 B2")[0]
    expected_weight, expected_bias, *expected_inputs = pool.run(1, gradients, None)[0]
    assert (bias, inputs) == (expected_bias, expected_inputs)
    assert not any(weight)
    assert any(expected_weight)


@pytest.mark.parametrize("cls", ["ColumnParallelLinear", "RowParallelLinear"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel(pool: Pool, cls: str, sequence_parallel: bool) -> None:
    options: dict[str, Any] = {"cls": cls, "tp": 2, "sequence_parallel": sequence_parallel}
    assert pool.run(2, gradients, "B0 B1 W0 B2 W1 W2", **options) == pool.run(2, gradients, None, **options)


def gpt_layer(tp: int, **settings: Any) -> Any:
    """Of a GPT, prepared for a split backward."""
    parallel_state.initialize_model_parallel(tp)
    tensor_parallel.model_parallel_cuda_manual_seed(3, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **settings,
    )
    spec = get_gpt_layer_local_spec()
    for norm in ("input_layernorm", "pre_mlp_layernorm"):
        setattr(spec.submodules, norm, SequenceParallelTorchNorm)
    layer = build_module(spec, config=config)
    assert split_weights(layer) == []
    return layer


def forward(layer: Any, seed: int = 1) -> Any:
    """The output for one microbatch, of which every rank has a part if the layer is sequence-parallel."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(LENGTH, 2, WIDTH, generator=generator)
    if layer.config.sequence_parallel:
        hidden = hidden.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    return layer(hidden.clone().requires_grad_(), attention_mask=mask)[0]


def bytes_kept_by_w(tp: int) -> int:
    """What waits for W after the B of a layer, each memory once."""
    output = forward(gpt_layer(tp, sequence_parallel=tp > 1))
    tasks: list[WeightTask] = []
    with deferring(tasks):
        output.square().sum().backward()
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for task in tasks for one in task.held}.values())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_w_keeps_what_the_formula_says_under_sequence_parallelism(pool: Pool, tp: int) -> None:
    plain = Shape.plain(layers=1, hidden=WIDTH, heads=4, seq=LENGTH, vocabulary=64)
    policy = replace(plain.policy, number=4, tensor=tp, sequence_parallel=tp > 1)
    expected = layer_retained(replace(plain, microbatch=2, policy=policy))
    for kept in pool.run(tp, bytes_kept_by_w, tp):
        assert kept == pytest.approx(expected, rel=0.05)


def shielded_backward(sequence_parallel: bool) -> tuple[list[str], int, list[bool]]:
    """What two Bs with work behind their collectives did in order, how many tasks they left to W, and which gradients are those
    of a fused backward."""
    layer = gpt_layer(2, sequence_parallel=sequence_parallel)
    names = {weight: name for name, weight in layer.named_parameters()}
    did: list[str] = []

    def waited(work: Any) -> Any:
        def wait() -> None:
            did.append("waits")
            work.wait()

        did.append("begins")
        return SimpleNamespace(wait=wait)

    def reduced(whole: torch.Tensor, group: Any) -> sequence.Started:
        part, work = reduce_scatter(whole, group)
        return part, waited(work)

    def summed(*given: Any, **options: Any) -> Any:
        work = all_reduce(*given, **options)
        return waited(work) if options.get("async_op") else work

    def noted(weight: torch.nn.Parameter, *rest: torch.Tensor) -> None:
        did.append(names[weight])
        accumulate(weight, *rest)

    reduce_scatter, all_reduce, accumulate = sequence.reduce_scatter, torch.distributed.all_reduce, linear.accumulate
    tasks: list[WeightTask] = []
    with (
        patch.object(sequence, "reduce_scatter", reduced),
        patch.object(torch.distributed, "all_reduce", summed),
        patch.object(linear, "accumulate", noted),
    ):
        for microbatch in range(2):
            output = forward(layer, microbatch)
            with deferring(tasks, shielded=True):
                output.square().sum().backward()
    left = len(tasks)
    run_weights([(task, []) for task in tasks])
    found = {name: weight.grad.clone() for weight, name in names.items()}
    layer.zero_grad()
    for microbatch in range(2):
        forward(layer, microbatch).square().sum().backward()
    return did, left, [torch.equal(found[name], weight.grad) for weight, name in names.items()]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_b_computes_behind_each_of_its_collectives(pool: Pool, sequence_parallel: bool) -> None:
    attention = ["begins", "self_attention.linear_proj.weight", "waits"]
    mlp = ["begins", "mlp.linear_fc2.weight", "waits"]
    for did, left, same in pool.run(2, shielded_backward, sequence_parallel):
        assert did == [*mlp, *attention] * 2
        assert left == 4  # of the linears that are cut by columns
        assert all(same)


def gradients_after_a_discarded_input(delayed: bool) -> list[float]:
    """Of a linear whose input is discarded after the forward and recomputed by B, as with --recompute-modules layernorm."""
    model = build(True, "ColumnParallelLinear", 1, {})
    tasks: list[WeightTask] = []
    for number in range(3):
        hidden = torch.full((4, 2, SIZE), 0.1 * number, requires_grad=True)
        recomputed = CheckpointWithoutOutput(fp8=None)  # its default asks for Transformer Engine
        output = model(recomputed.checkpoint(torch.exp, hidden))
        recomputed.discard_output_and_register_recompute(output)
        with deferring(tasks):
            output.square().sum().backward()
        if not delayed:
            tasks.pop().run()
    for task in tasks:
        task.run()
    return model.module.linear.weight.main_grad.flatten().tolist()


def test_w_uses_an_input_that_b_recomputed(pool: Pool) -> None:
    at_once = pool.run(1, gradients_after_a_discarded_input, False)
    assert any(at_once[0])
    assert pool.run(1, gradients_after_a_discarded_input, True) == at_once


def readiness() -> list[bool]:
    """Whether DDP has started to reduce the one bucket, after each pass of the last microbatch."""
    model = build(True, "ColumnParallelLinear", 1, {"overlap_grad_reduce": True})
    started = []
    for _iteration in range(2):  # DDP learns in the first what to expect
        model.zero_grad_buffer()
        loss = model(torch.ones(4, 2, SIZE, requires_grad=True)).square().sum()
        tasks: list[Any] = []
        with deferring(tasks):
            loss.backward()
        group = model.bucket_groups[0]
        started = [group.grad_reduce_handle is not None]
        with torch.no_grad():
            tasks[0].run()
        started.append(group.grad_reduce_handle is not None)
        model.finish_grad_sync()
    return started


def test_reduction_starts_after_the_last_w(pool: Pool) -> None:
    assert pool.run(2, readiness) == [[False, True]] * 2


def what_is_fused() -> list[str]:
    run = tiny_gpt.Run("zb-h1", pp=1)
    return split_weights(unwrap_model(run.chunks[0]))


def test_names_what_runs_fused(pool: Pool) -> None:
    (fused,) = pool.run(1, what_is_fused)[0]
    assert fused.startswith("output_layer: shares its weight with the embedding")


def what_the_log_says_is_fused() -> list[str]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.pipeline.model.build")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    tiny_gpt.Run("zb-v", pp=2, flags=("--num-experts", "2", "--untie-embeddings-and-output-weights", "--disable-bias-linear"))
    logger.removeHandler(handler)
    return logged


def test_the_log_names_a_reason_once_with_the_number_of_modules(pool: Pool) -> None:
    for line in (line for (line,) in pool.run(2, what_the_log_says_is_fused)):
        assert line.count("TopKRouter has no backward that splits") == 1
        assert line.startswith("backward is not split, runs fused in B: chunk 0: ") and " and 1 more: TopKRouter" in line


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("main_dtype", ["float32", "same"])
def test_accumulates_in_place_on_a_gpu(dtype: str, main_dtype: str) -> None:
    kind = getattr(torch, dtype)
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(256, 1, 128, device="cuda", dtype=kind, generator=generator)
    grad_output = torch.randn(256, 1, 64, device="cuda", dtype=kind, generator=generator)
    linear = torch.nn.Linear(128, 64, bias=False, device="cuda", dtype=kind)
    weight: Any = linear.weight
    main_grad = torch.ones(64, 128, device="cuda", dtype=torch.float32 if main_dtype == "float32" else kind)
    weight.main_grad = main_grad
    prepare(weight)
    register_hook(linear, lambda: None)
    WeightGradient(weight, Part(hidden), Part(grad_output)).run()
    expected = 1 + grad_output.flatten(0, 1).double().t() @ hidden.flatten(0, 1).double()
    assert weight.main_grad is main_grad
    tolerance = 1e-2 if main_grad.dtype == torch.float32 else 0.5
    torch.testing.assert_close(main_grad.double(), expected, rtol=tolerance, atol=tolerance)
    assert weight.grad_added_to_main_grad
    assert weight.grad is not None
    assert weight.grad.untyped_storage().nbytes() <= 8


def without_delay() -> str:
    model = build(False, "ColumnParallelLinear", 1, {})
    assert split_weights(model.module) == []
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(4, 2, SIZE, requires_grad=True)).sum().backward()
    return str(error.value)


def test_ddp_that_does_not_wait_for_weights_is_an_error(pool: Pool) -> None:
    assert "after split_weights" in pool.run(1, without_delay)[0]


def unpatched() -> str:
    layers.LinearWithGradAccumulationAndAsyncCommunication = linear.LinearWithGradAccumulationAndAsyncCommunication
    try:
        with pytest.raises(RuntimeError) as error:
            split_linear.split_weights(torch.nn.Linear(2, 2))
    finally:
        patches.install()
    return str(error.value)


def test_splitting_unpatched_linears_is_an_error(pool: Pool) -> None:
    assert "patches.install()" in pool.run(1, unpatched)[0]
