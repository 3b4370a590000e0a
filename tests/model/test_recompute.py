"""Recomputed activations: B recomputes once, W uses what B recomputed, and stock's numbers come out."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
import torch
from marked import rest
from megatron.core.utils import unwrap_model
from pool import Pool

from megatron.pipeline.backward.linear import WeightGradient

FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
UNEVEN = "--recompute-granularity full --recompute-num-layers 2 --recompute-method uniform"
MODULES = "--recompute-granularity selective --recompute-modules"


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, f"{FULL} uniform --overlap-grad-reduce"),
        rest(2, f"{FULL} block --hidden-dropout 0.1"),
        (2, f"{MODULES} mlp core_attn --disable-bias-linear --attention-dropout 0.1"),
        rest(2, f"{MODULES} mlp --disable-bias-linear --recompute-fused-backward"),
    ],
)
def test_equals_stock(pool: Pool, ranks: int, flags: str) -> None:
    options: dict[str, Any] = {"pp": 2, "microbatches": 4, "iterations": 2, "flags": tuple(flags.split())}
    stock, ours = pool.each(ranks, tiny_gpt.train, ("stock", "zb-h1"), **options)
    assert ours == stock


def what_ran(flags: tuple[str, ...]) -> tuple[set[int], set[int], int, int]:
    """How often each layer ran forwards outside and inside of backwards, and how many weight gradients there and in W."""
    run: Any = tiny_gpt.Run("zb-h1", pp=2, microbatches=MICROBATCHES, flags=flags)
    forwards: dict[tuple[bool, int], int] = {}
    gradients = {False: 0, True: 0}
    tasks: Any = WeightGradient
    compute = tasks.run

    def count_forward(layer: Any, _inputs: Any) -> None:
        key = in_backward(), layer.layer_number
        forwards[key] = forwards.get(key, 0) + 1

    def count_gradient(task: Any) -> None:
        gradients[in_backward()] += 1
        compute(task)

    for layer in unwrap_model(run.chunks[0]).decoder.layers:
        layer.register_forward_pre_hook(count_forward)
    tasks.run = count_gradient
    try:
        run.step(0)
    finally:
        tasks.run = compute
    outside, inside = ({forwards.get((where, layer), 0) for _, layer in forwards} for where in (False, True))
    return outside, inside, gradients[True], gradients[False]


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


MICROBATCHES = 5
LINEARS = 2 * 4  # layers of a rank, linears of a layer


@pytest.mark.parametrize(("flags", "linears"), [(f"{FULL} uniform", LINEARS), (f"{UNEVEN} --num-layers 6", 3 * 4)])
def test_b_recomputes_once_and_w_not_at_all(pool: Pool, flags: str, linears: int) -> None:
    for outside, inside, in_b, in_w in pool.run(2, what_ran, tuple(flags.split())):
        assert outside == inside == {MICROBATCHES}
        assert in_b == 0
        assert in_w in (linears * MICROBATCHES, (linears + 1) * MICROBATCHES), "the last rank has the output layer too"


def test_fused_on_request(pool: Pool) -> None:
    for outside, inside, in_b, in_w in pool.run(2, what_ran, tuple(f"{FULL} uniform --recompute-fused-backward".split())):
        assert outside == inside == {MICROBATCHES}
        assert in_b == LINEARS * MICROBATCHES
        assert in_w in (0, MICROBATCHES), "the output layer, which is not recomputed, splits"


SIZES = ("--seq-length", "64", "--hidden-size", "64", "--untie-embeddings-and-output-weights")
TENSOR = 2 * 64 * 64 * 4  # bytes of a microbatch's hidden states: 2 samples, 64 tokens, 64 wide, float32


def peak_bytes(pipeline: Any, _chunks: Any) -> list[int]:
    return pipeline.report().peak_activation_bytes


def peaks(pool: Pool, schedule: str, recompute: str) -> list[int]:
    options: dict[str, Any] = {"pp": 4, "microbatches": 6, "iterations": 2, "inspect": peak_bytes}
    return pool.run(4, tiny_gpt.train, schedule, flags=(*SIZES, *recompute.split()), **options)[0]


def test_fused_layers_hold_nothing_for_w(pool: Pool) -> None:
    """What recomputation frees stays free: ZB-H1 then holds what 1F1B holds."""
    fused = f"{FULL} uniform --recompute-fused-backward"
    zb_h1, one_f_one_b = peaks(pool, "zb-h1", fused), peaks(pool, "1f1b", fused)
    # The last rank also keeps what the output layer, which is not recomputed, needs for its W.
    assert zb_h1[:-1] == one_f_one_b[:-1]


def test_w_holds_inputs_and_output_gradients(pool: Pool) -> None:
    """Between B and W, a layer holds for its four linears 1 + 1 + 1 + 4 tensors that went in and 3 + 1 + 4 + 1 that came back."""
    recomputed, fused = (peaks(pool, "zb-h1", f"{FULL} uniform {flag}") for flag in ("", "--recompute-fused-backward"))
    for rank, (more, less) in enumerate(zip(recomputed[:-1], fused[:-1], strict=True)):
        waiting = rank + 1  # microbatches between B and W, of one layer each
        assert 15 * waiting * TENSOR - TENSOR < more - less <= 16 * waiting * TENSOR
