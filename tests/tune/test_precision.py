"""Linears in fewer than 16 bits: seconds, bytes of activations and of state, and what ranges say of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.pipeline.cli import tune
from megatron.pipeline.cli.memory import Prediction, predicted
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.support import check_trained
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.planner.costmodel import ranges
from megatron.pipeline.planner.costmodel.device import NOT_FITTED, named, shipped
from megatron.pipeline.planner.costmodel.estimate import computing_seconds
from megatron.pipeline.planner.costmodel.memory import gathered_bytes, state_bytes
from megatron.pipeline.planner.costmodel.parameters import parameters
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.shape.activation_policy import ActivationPolicy
from megatron.pipeline.planner.shape.experts import Experts
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.precision import RECIPES, Quantized
from megatron.pipeline.tune.candidate import Cluster

GB200 = named("GB200")
SHAPE = replace(Shape.plain(8, 1024, 16, 512, 1024), policy=ActivationPolicy(hidden_masks=False))
FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --micro-batch-size 1 --global-batch-size 32 "
    "--train-iters 1 --lr 1e-4 --bf16 --tokenizer-type NullTokenizer --vocab-size 1000 --untie-embeddings-and-output-weights "
    "--transformer-impl transformer_engine --pipeline-model-parallel-size 4 --hidden-dropout 0 --attention-dropout 0 "
    "--use-distributed-optimizer --position-embedding-type rope"
)


def quantized(recipe: str, layers: tuple[bool, ...] = (True,) * 8) -> Shape:
    return replace(SHAPE, quantized=Quantized(RECIPES[recipe], layers))


def training(more: str = "") -> Prediction:
    return predicted([*FLAGS.split(), *more.split()], data_parallel_size=4)


def test_first_and_last_layers_stay_in_16_bits() -> None:
    args = training("--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2").args
    shape = shape_of(args)
    assert shape.quantized is not None and shape.quantized.layers == (False, *[True] * 5, False, False)
    first, second, last = (shape.of_layers(range(layer, layer + 2)) for layer in (0, 2, 6))
    assert [one.quantized and one.quantized.share for one in (first, second, last)] == [0.5, 1, 0]
    whole = computing_seconds(replace(shape, quantized=None), GB200)
    assert computing_seconds(last, GB200).weight == whole.weight
    half = computing_seconds(first, GB200).weight
    assert half == pytest.approx((whole.weight + computing_seconds(second, GB200).weight) / 2, rel=0.01)


def test_a_gpu_without_the_products_says_so() -> None:
    with pytest.raises(ValueError, match="H100-80GB has no products in mxfp8; its file has fp8: change the recipe or the GPU"):
        computing_seconds(quantized("mxfp8"), named("H100-80GB"))
    with pytest.raises(ValueError, match="A100-80GB has no products in fp8; its file has none but 16 bits"):
        computing_seconds(quantized("tensorwise"), named("A100-80GB"))


def test_weights_have_copies_for_products_or_are_kept_in_fewer_bits() -> None:
    shape = quantized("mxfp8")
    count = parameters(shape, linear(4), [2] * 4)[1]
    assert count.quantized == count.total == parameters(SHAPE, linear(4), [2] * 4)[1].total
    plain = training().args
    copies, kept = (
        training(f"--fp8-format e4m3 --fp8-recipe mxfp8 {more}").args
        for more in ("", "--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag")
    )
    more = [state_bytes(describe(args), count) - state_bytes(describe(plain), count) for args in (copies, kept)]
    assert more == [pytest.approx(2.0625 * count.total), pytest.approx(0.0625 * count.total)]
    tensorwise = training("--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather").args
    assert [gathered_bytes(describe(args), count) for args in (plain, copies, kept, tensorwise)] == [2, 2, 2, 1]
    assert training("--fp4-format e2m1").fullest.total > training().fullest.state
    on = [state_bytes(describe(tensorwise), count, named(gpu)) for gpu in ("H100-80GB", "GB200")]
    assert on[0] - on[1] == count.total  # whose products read weights by columns, too


def test_a_gpu_has_the_memory_that_it_shows_not_that_of_its_label() -> None:
    shown = {"H200": 143771, "B200": 183359, "GB200": 189471, "B300": 275040, "GB300": 284208}  # MiB, by nvidia-smi
    assert {name: named(name).memory / 2**20 for name in shown} == shown


@pytest.mark.parametrize(
    ("flags", "each"),
    [
        ("", 12.0),
        ("--use-precision-aware-optimizer", 10.0),  # half of the copy is the weight itself
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 --main-params-dtype fp16", 5.0),
        ("--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.75", 2.5),
    ],
)
def test_the_optimizer_has_the_bytes_that_flags_say(flags: str, each: float) -> None:
    args = training(flags).args
    count = parameters(shape_of(args), linear(4), [2] * 4)[1]
    assert state_bytes(describe(args), count) == pytest.approx(count.total * (2 + 4 + each / 4))


@pytest.mark.parametrize(
    "flags", ["--fp8-format hybrid", "--fp4-format e2m1", "--use-precision-aware-optimizer", "--moe-token-dispatcher-type flex"]
)
def test_training_refuses_what_is_only_predicted(flags: str) -> None:
    with pytest.raises(ValueError, match=flags.split(maxsplit=1)[0]):
        check_trained(parse([*FLAGS.split(), *flags.split()]))


def test_a_rack_is_one_node() -> None:
    assert [GB200.node(gpus) for gpus in (16, 64, 72, 256, 1024, 144)] == [16, 64, 72, 64, 64, 72]
    assert [named("H100-80GB").node(gpus) for gpus in (4, 12, 64)] == [4, 8, 8]


@pytest.mark.parametrize(
    ("gpu", "gpus", "per_node", "hosts"),
    [("GB200", 256, 64, 64), ("GB300", 72, 72, 18), ("GB200", 6, 6, 2), ("GB200", 8, 2, 4), ("H100-80GB", 64, 8, 8)],
)
def test_a_rack_has_several_hosts_which_start_its_ranks(gpu: str, gpus: int, per_node: int, hosts: int) -> None:
    cluster = Cluster(named(gpu), gpus, per_node)
    lines = tune._how_to_run(cluster, Path("x"), "Megatron-LM/pretrain_gpt.py")
    assert f"sbatch --nodes {hosts} --gpus-per-node {gpus // hosts} " in lines
    assert lines.count(f"--nnodes {hosts} --nproc-per-node {gpus // hosts} ") == 2


def test_every_efficiency_says_what_it_is_fitted_to() -> None:
    found = {name: named(name) for name in shipped()}
    fitted = {name for name, device in found.items() if device.fitted_to != NOT_FITTED}
    assert fitted == {"A100-80GB", "H100-80GB", "B200", "GB200", "B300", "GB300"}
    for device in found.values():
        assert all(word in device.source for word in ("data sheet", "assumption")), device.name
        for one in device.precisions:
            assert one.peak > device.peak and one.fitted_to
    assert {one.name for one in GB200.precisions} == {recipe.peak for recipe in RECIPES.values()}


def test_ranges_are_those_of_the_class() -> None:
    experts = replace(quantized("mxfp8"), experts=Experts((True,) * 8, 8, 2, 512, 0, 4096))
    rows = [ranges.learnt("throughput", one, GB200) for one in (SHAPE, quantized("mxfp8"), experts)]
    assert [(row.kind, row.precision) for row in rows] == [("dense", "16 bits"), ("dense", ""), ("experts", "mxfp8")]
    assert all(row.fitted and row.low < 1 < row.high and row.source and row.date for row in rows)
    assert not ranges.learnt("throughput", quantized("mxfp8"), named("MI355X")).fitted
    assert ranges.learnt("memory", experts, GB200).kind == "experts"
    sizes: list[dict[str, Any]] = [{}, {"hidden": 64}, {"seq": 2**20}, {"hidden": 2**15}]
    near, *far = (ranges.learnt("throughput", replace(SHAPE, **{"hidden": 4096, "seq": 4096} | size), GB200) for size in sizes)
    assert "not measured" not in near.source
    for row in far:
        assert row.low < near.low < near.high < row.high and "not measured" in row.source
    assert ranges.in_words(41_234, 46_000, "tokens/s") == "41.2 to 46 k tokens/s"


def test_ranges_have_a_slower_end_where_more_gpus_wait_for_each_other() -> None:
    found = ranges.learnt("throughput", SHAPE, GB200)
    assert ranges.at_scale(found, 512, 1.0) == found
    slow, slower, short = (ranges.at_scale(found, *given) for given in ((1024, 10.0), (8192, 10.0), (8192, 1.0)))
    assert found.low > slow.low > slower.low > short.low > 0 and slow.high == found.high
    # Iterations of 10 s / low may take 1.6 s more.
    assert 10 / slower.low == pytest.approx(10 / found.low + 1.6) and "1.6 s more of an iteration for 8192 GPUs" in slower.source


def test_what_another_gpu_lent_is_said_and_widens_the_range() -> None:
    """H20 has a seventh of H100's peak at as much bandwidth."""
    tensorwise, h20 = quantized("tensorwise"), named("H20")
    assert ranges.doubts(SHAPE, named("H100-80GB")) == ranges.doubts(quantized("mxfp8"), GB200) == []
    words = [line.partition(" is by that of ")[2].partition(";")[0] for line in ranges.doubts(tensorwise, named("MI300X"))]
    assert words == ["H100-80GB", "GB200"]
    assert ranges.doubts(SHAPE, h20) == [
        f"H20: the efficiency in 16 bits, {h20.efficiency:g}, is by that of H100-80GB; no training on H20 in it was compared"
    ]
    near, far = (ranges.learnt("throughput", replace(SHAPE, hidden=4096, seq=4096), named(name)) for name in ("H200", "H20"))
    assert far.low < near.low and near.high < far.high and "0.13 times H100-80GB's" in far.source
    for name in shipped():
        for of in ("", *(one.name for one in named(name).precisions)):
            own = named(name).products(of)
            assert bool(own.lent) is (own.fitted_to == NOT_FITTED), name
            if own.lent:  # as many bytes for each operation: more of a lower peak, or of a faster memory
                other = named(own.lent)
                ridges = [one.products(of).peak / one.bandwidth for one in (named(name), other)]
                given = other.products(of).efficiency
                assert own.efficiency == pytest.approx(1 / (1 + (1 / given - 1) * ridges[0] / ridges[1]), abs=2e-3), name
