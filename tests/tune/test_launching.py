"""CUDA graphs and windows of attention by flags, numbers in fewer bits, Muon's state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.pipeline.cli.memory import Prediction, _text, predicted
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.planner.costmodel.activations import layer_temporary
from megatron.pipeline.planner.costmodel.device import named, shipped
from megatron.pipeline.planner.costmodel.estimate import costs_of_training, launch_seconds, layer_seconds
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.costmodel.memory import state_bytes
from megatron.pipeline.planner.costmodel.parameters import parameters
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.slots import slots_of
from megatron.pipeline.planner.shape import gpt
from megatron.pipeline.planner.shape.description import Ranks
from megatron.pipeline.planner.shape.experts import Experts
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.precision import RECIPES, Quantized

GB200 = named("GB200")
FLAGS = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 --global-batch-size 32 "
    "--bf16 --tokenizer-type NullTokenizer --vocab-size 1000 --untie-embeddings-and-output-weights "
    "--pipeline-model-parallel-size 4 --hidden-dropout 0 --attention-dropout 0 "
    "--position-embedding-type rope --disable-bias-linear"
)


def training(more: str = "") -> Prediction:
    return predicted([*FLAGS.split(), *more.split()], data_parallel_size=4)


@given(
    st.sampled_from([(4, 256), (16, 64), (128, 4096), (256, 32768)]), st.sampled_from([1, 8, 64]),
    st.sampled_from([64, 1024, 8192]), st.sampled_from([256, 4096]), st.sampled_from([*RECIPES]),
    st.sampled_from(shipped()), st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_fewer_bits_never_take_more_than_twice_as_long(
    sizes: tuple[int, int], parallel: int, hidden: int, seq: int, recipe: str, gpu: str, grouped: bool, shared: bool
) -> None:
    device, (count, ffn) = named(gpu), sizes
    assume(any(one.name == RECIPES[recipe].peak for one in device.precisions))
    parallel = min(parallel, count)
    experts = Experts((True,) * 8, count, 2, ffn, ffn * shared, 4 * hidden, parallel=parallel, grouped=grouped)
    shape = replace(Shape.plain(8, hidden, 8, seq, 1024), experts=experts, ffn=experts.mean_ffn, gated=True)
    links = Links.of(device, 8, Ranks(1, 1, parallel, 64, 1))
    whole = layer_seconds(shape, device, links)
    fewer = layer_seconds(replace(shape, quantized=Quantized(RECIPES[recipe], (True,) * 8)), device, links)
    assert all(one <= 2 * other for one, other in zip(fewer, whole, strict=True))


@pytest.mark.parametrize(
    ("flags", "least"),
    [
        ("", 2.2e-3),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router", 2.2e-3 * 0.5 + 2 * 5e-5),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", 0.0),
        ("--cuda-graph-impl full_iteration", 0.0),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules moe", 2.2e-3 * 0.6 + 5e-5),
        ("--cuda-graph-impl transformer_engine", 4 * 5e-5),
    ],
)
def test_flags_say_what_cuda_graphs_launch(flags: str, least: float) -> None:
    """The host launches the kernels of a module one by one, or its graph at once, in every precision."""
    prediction = training(f"--num-experts 8 --moe-grouped-gemm {flags}")
    shape = shape_of(prediction.args)
    assert launch_seconds(shape, GB200).forward == pytest.approx(least)
    dense = launch_seconds(replace(shape, experts=None), GB200)
    assert dense.forward < least or least == 0 == dense.forward
    fewer = launch_seconds(replace(shape, quantized=Quantized(RECIPES["mxfp8"], (True,) * 8)), GB200)
    assert least <= fewer.forward <= 2 * least
    assert any("an estimate" in note for note in prediction.args.not_modelled) is bool(flags)


def test_attention_reads_the_keys_of_its_window() -> None:
    whole, some, every = (
        shape_of(training(flags).args)
        for flags in ("", "--window-size 128,0 --window-attn-skip-freq 2", "--window-size (128,0) --window-attn-skip-freq [1]*8")
    )
    assert some.windows is not None
    assert some.windows.layers == (257, 2048) * 4
    assert (whole.keys, some.keys, every.keys) == (2048, (2048 + 257) / 2, 257)
    assert gpt.attention_work(every).forward == pytest.approx(gpt.attention_work(whole).forward * 257 / 2048)
    assert some.of_layers(range(1, 2)).keys == 2048
    assert gpt.linear_work(some) == gpt.linear_work(whole)
    assert shape_of(training("--window-size=-1,-1").args).windows is None


def test_muon_keeps_one_moment_of_matrices() -> None:
    found = {name: training(f"--optimizer {name}").args for name in ("adam", "muon", "dist_muon")}
    count = parameters(shape_of(found["adam"]), linear(4), [2] * 4)[0]
    assert 0 < count.layers < count.total
    whole, muon, cut = (state_bytes(describe(args), count) for args in found.values())
    assert whole - muon == pytest.approx(4 * count.layers)
    optimizer = muon - count.total * (2 + 4)
    assert cut == pytest.approx(count.total * (2 + 4) + optimizer / 4)
    assert any("orthogonalised" in note for note in found["muon"].not_modelled)


def test_graphs_of_layers_keep_what_their_slots_have() -> None:
    """Inputs, gradients on both sides and a pool of temporaries; a graph of the whole iteration has none."""
    flags = "--cuda-graph-impl transformer_engine --cuda-graph-scope attn"
    for schedule in ("zb-h1", "zb-v", "stock"):
        plain, graphs, whole = (
            training(f"--pipeline-schedule {schedule} {more}") for more in ("", flags, "--cuda-graph-impl full_iteration")
        )
        assert whole.ranks == plain.ranks
        hidden, pool = shape_of(plain.args).hidden_bytes, layer_temporary(shape_of(plain.args))
        expected = [hidden * rank.layers * rank.microbatches for rank in plain.ranks]
        if schedule != "stock":
            made, placement = graphs.schedule, graphs.schedule.placement
            programs = lower(made, uniform(placement))
            slots = [sum(len(set(row)) for row in slots_of(*each)) for each in zip(programs, placement.stages, strict=True)]
            expected = [count * (3 * hidden * 8 / plain.schedule.placement.depth + pool) for count in slots]
        assert [rank.graphs for rank in graphs.ranks] == pytest.approx(expected)
        more = [other.total - one.total for one, other in zip(plain.ranks, graphs.ranks, strict=True)]
        assert more == pytest.approx(expected)
        assert "of other GiB, CUDA graphs keep up to" in _text(graphs, None, None, 80.0, [])


def test_weight_gradients_of_megatron_cores_graphs_are_in_b() -> None:
    """The plan knows: W is the output layer's alone, and holds nothing of layers."""
    engines, local = (training(f"--cuda-graph-impl {graphs}") for graphs in ("transformer_engine", "local"))
    links = Links.within(GB200)
    ours, theirs = (costs_of_training(describe(one.args), linear(4), [2] * 4, GB200, links) for one in (local, engines))
    for stage, split in zip(ours.stages, theirs.stages, strict=True):
        assert stage.total == pytest.approx(split.total - GB200.latency)  # of a pass that has nothing to do
        assert (stage.weight == 0 == stage.retained) == (stage is not ours.stages[-1])
    assert 0 < ours.stages[-1].weight < theirs.stages[-1].weight
