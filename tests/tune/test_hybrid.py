"""Predictions of hybrid models: sizes of Mamba-2, patterns as each release writes them, and refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from command import refusal

from megatron.pipeline.cli import main
from megatron.pipeline.cli.memory import Prediction, predicted
from megatron.pipeline.cli.tune import base_flags
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.planner.costmodel.activations import layer_activation, layer_retained
from megatron.pipeline.planner.costmodel.device import named
from megatron.pipeline.planner.costmodel.estimate import by_layer, computing_seconds
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.costmodel.parameters import layer_parameters, total_parameters
from megatron.pipeline.planner.planning.balance import Model
from megatron.pipeline.planner.planning.planned import Variant
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.shape import gated_delta
from megatron.pipeline.planner.shape.activation_policy import ActivationPolicy
from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.experts import Experts
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.hybrid import Hybrid, Pattern
from megatron.pipeline.planner.shape.latent import Indexer
from megatron.pipeline.planner.shape.mamba import mixer
from megatron.pipeline.planner.shape.stages import heaviest
from megatron.pipeline.session.planning import plan_pipeline
from megatron.pipeline.tune.candidate import Candidate, Cluster
from megatron.pipeline.tune.costs import CandidateCosts
from megatron.pipeline.tune.layouts import LayoutChoices, Layouts

H100 = named("H100-80GB")
SIZES = ModelDescription(1, 4096, 16384, 32, 8192, 1, 128)
MAMBA = mixer(replace(SIZES, mamba_num_heads=128, mamba_head_dim=64, mamba_num_groups=8, mamba_state_dim=128))
# Nemotron-H-8B (arXiv 2504.03624), as Megatron-LM 0.16 has its flags.
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
OTHER = f"M{PATTERN[:-1]}"  # of as many letters
NEMOTRON = (
    "--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --ffn-hidden-size 21504 "
    "--kv-channels 128 --seq-length 8192 --micro-batch-size 1 --global-batch-size 8 --squared-relu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type none --vocab-size 131072 --bf16 "
    "--tokenizer-type NullTokenizer --mamba-num-heads 128 --hidden-dropout 0 --attention-dropout 0 "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4"
)
OLD = f"{NEMOTRON} --num-layers 52 --is-hybrid-model --mamba-state-dim 128 --mamba-head-dim 64 --mamba-num-groups 8"


def of(flags: str, *more: str) -> Prediction:
    return predicted([*flags.split(), *more])


def hybrid(layers: str, **changes: object) -> Shape:
    plain = Shape(len(layers), 4096, 32, 8, 128, 0.0, False, 8192, 1, 1024, norm=1, policy=ActivationPolicy(hidden_masks=False))
    shape = replace(plain, hybrid=Hybrid(tuple(layers), (), (("M", MAMBA),)), **changes)  # type: ignore[arg-type]
    return replace(shape, ffn=shape.share("-") * 21504 + (shape.experts.mean_routed_ffn if shape.experts else 0))


def test_parameters_are_those_of_the_paper() -> None:
    """By hand: 109.6, 41.9 and 176.2 million of each kind of layer; 8.1 billion together."""
    inner, made = 8192, 2 * 8192 + 2 * 8 * 128 + 128
    mamba = 4096 * (made + inner) + 5 * (inner + 2048) + 3 * 128 + inner + 4096
    shape = hybrid("M*-")
    assert [layer_parameters(shape, layer).total for layer in range(3)] == [
        mamba, 4096 * 128 * (2 * 32 + 2 * 8) + 4096, 2 * 4096 * 21504 + 4096,
    ]  # fmt: skip
    whole = total_parameters(shape_of(of(OLD, "--hybrid-override-pattern", PATTERN).args), tied=False)
    assert whole == pytest.approx(8.1e9, rel=0.01)


def test_attention_and_an_mlp_are_a_transformer_layer() -> None:
    """``*-`` and ``*E`` are a GPT's layers, half a layer each."""
    experts = Experts((True,), 8, 2, 1024, 0, 21504)
    for symbols, experts_of in (("*-", None), ("*E", experts)):
        plain = replace(
            hybrid(symbols), hybrid=None, layers=1, ffn=experts.mean_ffn if experts_of else 21504.0, experts=experts_of
        )
        halves = hybrid(symbols, experts=experts_of and replace(experts_of, layers=(False, True)))
        for number in (layer_activation, layer_retained):
            assert 2 * number(halves) == pytest.approx(number(plain))
        assert 2 * computing_seconds(halves, H100).total == pytest.approx(computing_seconds(plain, H100).total)
        assert sum(layer_parameters(halves, part).total for part in (0, 1)) == layer_parameters(plain, 0).total


def test_patterns_of_all_releases() -> None:
    """0.16 has a pattern beside the number of layers, or shares; later ones a pattern with stages and further predictions."""
    old = of(
        OLD, "--hybrid-override-pattern", PATTERN, "--spec", "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"
    )
    stages = "|".join(PATTERN[first : first + 13] for first in range(0, 52, 13))
    new = of(NEMOTRON, "--hybrid-layer-pattern", stages)
    assert new.ranks == old.ranks and [rank.layers for rank in old.ranks] == [13] * 4
    assert not old.args.not_modelled
    further = of(NEMOTRON, "--hybrid-layer-pattern", f"{stages}/*-/*-")
    more = [row.parameters - other.parameters for row, other in zip(further.ranks, new.ranks, strict=True)]
    assert more[:3] == [0, 0, 0]  # the last rank has two layers of an attention and an MLP each, and embeddings
    assert more[3] == pytest.approx(2 * (41.9e6 + 176.2e6 + 2 * 4096**2) / 2 + 131072 * 4096 / 2, rel=0.01)
    uneven = of(NEMOTRON, "--hybrid-layer-pattern", f"{PATTERN[:10]}|{PATTERN[10:26]}|{PATTERN[26:39]}|{PATTERN[39:]}")
    assert [rank.layers for rank in uneven.ranks] == [10, 16, 13, 13]
    shares = of(OLD, "--hybrid-attention-ratio", "0.08", "--hybrid-mlp-ratio", "0.46")
    counts = [shape_of(shares.args).hybrid.layers.count(symbol) for symbol in "M*-"]  # type: ignore[union-attr]
    assert counts == [24, 4, 24]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--hybrid-layer-pattern MX*-", "--hybrid-layer-pattern MX*- with X: known are M G * - E + D"),
        ("--hybrid-layer-pattern MM*- --num-layers 8", "--num-layers 8: --hybrid-layer-pattern MM*- has 4 layers"),
        ("--hybrid-layer-pattern ME*E", "ME*E has layers of experts (E): give --num-experts"),
        ("--hybrid-layer-pattern MM*-/*-/M-", "give the same symbols behind every /"),
        ("--hybrid-layer-pattern |||", "||| has no layers: give some of M G * - E"),
        ("--num-layers 8 --hybrid-attention-ratio 0.7 --hybrid-mlp-ratio 0.7", "0.7 are more than all 8 layers: lower one"),
        ("--hybrid-layer-pattern MM*- --mamba-num-groups 3", "--mamba-num-groups 3 does not divide 128 heads of Mamba-2"),
        (
            "--hybrid-layer-pattern MM*- --mamba-num-groups 1",
            "--tensor-model-parallel-size 2 does not divide --mamba-num-groups 1",
        ),
        ("--experimental-attention-variant gated_delta_net --num-layers 8", "gated_delta_net needs --linear-attention-freq"),
        ("--experimental-attention-variant dsa --num-layers 8", "needs --dsa-indexer-n-heads, --dsa-indexer-head-dim, --dsa-"),
        (
            "--experimental-attention-variant gated_delta_net --num-layers 8 --linear-attention-freq [1]*4",
            "--linear-attention-freq lists 4 layers and --num-layers is 8",
        ),
        (
            "--hybrid-layer-pattern GG*- --linear-num-value-heads 24",
            "--linear-num-value-heads 24 is not a multiple of --linear-num-key-heads 16",
        ),
        ("--moe-load-factor 0.5", "--moe-load-factor: expected a number of at least 1, got 0.5"),
        ("--hybrid-layer-pattern MM*-D", "MM*-D has attention of 2 kinds, * and D: give one of them"),
        ("--hybrid-layer-pattern MM+-D", "MM+-D has attention of 2 kinds, + and D: give one of them"),
        ("--hybrid-layer-pattern MM+-", "--multi-latent-attention has keys and values for every head"),
        ("--hybrid-layer-pattern MM|*-|M-", "MM|*-|M- has 3 stages, and the schedule has 4: leave | out, or write it 3 times"),
        (
            "--hybrid-layer-pattern MM|*-|M-|M- --decoder-first-pipeline-num-layers 2",
            "says where every layer goes: leave out --num-layers-in-first-pipeline-stage",
        ),
        (
            "--hybrid-layer-pattern MM*- --pipeline-schedule zb-v",
            "--hybrid-layer-pattern MM*- cannot be split over 4 pipeline ranks",
        ),
        ("--hybrid-layer-pattern MMD- --pipeline-schedule zb-h1", "MMD- with D uses the weight of a linear without its forward"),
        (
            "--hybrid-layer-pattern MM*- --overlap-moe-expert-parallel-comm",
            "--overlap-moe-expert-parallel-comm runs megatron-core's plans of layers, which it has for GPTModel alone",
        ),
        (
            "--hybrid-layer-pattern MM|*-|M-|M- --account-for-loss-in-pipeline-split",
            "says where every layer goes, by | or by what letters take, and --account-for-loss-in-pipeline-split would, too",
        ),
        (
            "--hybrid-layer-pattern MM|*-|M-|M- --pipeline-schedule zb-v",
            "MM|*-|M-|M- has 4 stages, and the schedule has 8: leave | out, or write it 7 times",
        ),
    ],
)
def test_refusals(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(capsys, "memory", NEMOTRON, flags)


def test_costs_of_stages_differ(capsys: pytest.CaptureFixture[str]) -> None:
    pattern = "|".join(("MMMM", "M-M-", "*-*-", "M*M-"))
    assert main(["costs", "--gpu", "H100-80GB", "--json", *NEMOTRON.split(), "--hybrid-layer-pattern", pattern]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert len({stage["forward"] for stage in stages}) == 4


# As NVIDIA's and Qwen's model cards and configurations have them.
EXPERTS = "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --num-experts 512"
SUPER = (
    f"{EXPERTS} --moe-router-topk 22 --moe-shared-expert-intermediate-size 5376 --moe-latent-size 1024 --mamba-num-heads 128 "
    "--mamba-head-dim 64 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 2688 --kv-channels 128 --squared-relu --normalization RMSNorm --disable-bias-linear --bf16 "
    "--untie-embeddings-and-output-weights --position-embedding-type none --vocab-size 131072 --tokenizer-type NullTokenizer "
    "--seq-length 8192 --micro-batch-size 1 --hybrid-layer-pattern "
    "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
)
NEXT = (
    f"{EXPERTS} --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512 --num-layers 48 "
    "--hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16 --group-query-attention --num-query-groups 2 "
    "--kv-channels 256 --qk-layernorm --attention-output-gate --normalization RMSNorm --position-embedding-type rope --swiglu "
    "--untie-embeddings-and-output-weights --disable-bias-linear --vocab-size 151936 --tokenizer-type NullTokenizer --bf16 "
    "--seq-length 4096 --micro-batch-size 1 --experimental-attention-variant gated_delta_net --linear-attention-freq 4"
)


@pytest.mark.parametrize(
    ("flags", "whole", "active"),
    [(SUPER, 120.7e9, 11.6e9), (NEXT, 79.7e9, 3.2e9)],
    ids=["Nemotron 3 Super 120B-A12B", "Qwen3-Next-80B-A3B"],
)
def test_narrow_tokens_of_experts_and_gated_delta_nets_are_as_published(flags: str, whole: float, active: float) -> None:
    """The second is without embedding and output layer, which the cards count or not."""
    shape = shape_of(of(flags).args)
    assert total_parameters(shape, tied=False) == pytest.approx(whole, rel=1e-3)
    assert shape.layer_weights * shape.layers == pytest.approx(active, rel=0.01)


def test_parameters_are_what_megatron_core_builds() -> None:
    """A ``GatedDeltaNet`` and a ``DSAIndexer`` of release 0.19.2, built on a CPU, have these numbers."""
    heads = replace(SIZES, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=48)
    net = gated_delta.mixer(replace(heads, linear_conv_kernel_dim=4))
    assert 256 * (net.projected + net.mixed) + net.parameters == 183_608
    indexer = Indexer(heads=8, width=64, keys=16)
    assert indexer.weights(hidden=256, queries=96) + 2 * 64 == 67_712


def test_stages_of_gated_delta_nets() -> None:
    """Attention in every fourth layer, and as many in each of four stages: ranks but the first have equally many parameters."""
    costs = of(NEXT, "--pipeline-model-parallel-size", "4", "--pipeline-schedule", "zb-v").ranks
    assert len({rank.parameters for rank in costs[1:]}) == 1


# From examples/post_training/modelopt/conf/nvidia of Megatron-LM; and NEXT's blocks as two letters each.
PUBLISHED = sorted((Path(__file__).parents[2] / "benchmarks" / "patterns").glob("*.yaml"))


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_published_patterns_gain_over_even_numbers(file: Path) -> None:
    """None is published with ``|``; a training of ours has the balance by default, and megatron-core's even numbers."""
    pipelined, pattern = f"--config {file} --pipeline-schedule", of(f"--config {file}").args.hybrid_layer_pattern
    found = of(f"{pipelined} 1f1b", "--hybrid-layer-pattern", pattern)
    model = describe(found.args)
    costs = by_layer(model, H100, 4, Links.of(H100, 8, model.ranks))
    split = Request("1f1b", 4, 16, layers=Model.by_layer(costs, Pattern.of(pattern)), objective="makespan").plan()
    assert split.split and split.split.even and split.value < 0.99 * split.split.even
    weights, extra = [stage.total for stage in costs.stages[1:-1]], {0: costs.stages[0].total, 3: costs.stages[-1].total}
    stock = of(f"{pipelined} stock", "--hybrid-layer-pattern", pattern).layers
    assert max(stock) - min(stock) <= 1
    assert heaviest(found.layers, linear(4), extra, weights) < 0.99 * heaviest(stock, linear(4), extra, weights)
    assert of(f"{pipelined} 1f1b", "--hybrid-layer-pattern", Pattern.of(pattern).cut(found.layers)).layers == found.layers


def test_the_search_balances_a_pattern_for_every_schedule() -> None:
    base = base_flags([*NEMOTRON.split(), "--hybrid-layer-pattern", PATTERN])
    choices = LayoutChoices([2], [4], [1], [1], [1], ["zb-h1", "zb-v"])
    layouts = Layouts(base, Cluster(H100, 8, 8), choices)
    (layout,) = layouts
    found = [*layouts.candidates(layout, stock=True), *layouts.candidates(layout, stock=False)]
    assert {one.is_stock for one in found} == {True, False}
    assert {one.variant.name for one in found} == {"1f1b", "interleaved", "zb-h1", "zb-v"}
    for one in found:
        pattern = Pattern.of(one.args.hybrid_layer_pattern)
        assert pattern.counts == one.layers and len(one.layers) == one.placement.depth
        assert pattern.letters == PATTERN and one.args.num_virtual_stages_per_pipeline_rank is None  # which upstream refuses
        assert one.args.vocabulary.spread or one.layers[-1] < max(one.layers)  # where the output layer is


def test_letters_of_latent_attention() -> None:
    """``+`` and ``D`` are the attention of the same GPT, with and without an indexer."""
    plain = (
        "--hidden-size 7168 --num-attention-heads 128 --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear "
        "--position-embedding-type rope --ffn-hidden-size 18432 --vocab-size 129280 --tokenizer-type NullTokenizer "
        "--seq-length 4096 --micro-batch-size 1 --bf16 --kv-channels 128"
    )
    sizes = "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048"
    for letter, more in (("+", ""), ("D", f"{sizes} --experimental-attention-variant dsa")):
        whole = of(f"{plain} --num-layers 8 --multi-latent-attention {more}")
        pattern = of(f"{plain} {more.partition('--exp')[0]}", "--hybrid-layer-pattern", 8 * f"{letter}-")
        found, expected = (total_parameters(shape_of(each.args), tied=False) for each in (pattern, whole))
        assert found == expected


def test_tables_by_letter(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*NEMOTRON.split(), "--hybrid-layer-pattern", PATTERN]
    for command, more in ((["memory"], []), (["costs", "--gpu", "H100-80GB"], ["F ms", "B ms", "W ms"])):
        assert main([*command, *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        first = next(index for index, line in enumerate(lines) if line.startswith("letter  layers  parameters"))
        assert [head for head in ("F ms", "B ms", "W ms") if head in lines[first]] == more
        assert [line.split()[:2] for line in lines[first + 1 : first + 4]] == [["M", "24"], ["-", "24"], ["*", "4"]]


def test_commands_split_a_pattern(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Costs by layer go to the planner, which says the pattern's own split beside the even one."""
    file = str(tmp_path / "layers.json")
    text = Pattern.of(PATTERN).cut([10, 10, 12, 20])
    assert main(["costs", "--gpu", "H100-80GB", "--by-layer", "-o", file, *NEMOTRON.split(), "--hybrid-layer-pattern", text]) == 0
    capsys.readouterr()
    plan = ["plan", "--schedule", "1f1b", "--pp", "4", "--microbatches", "8", "--costs", file]
    assert main([*plan, "--balance", text, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    split = data["balance"]
    assert data["makespan"] < split["even"] < split["written"] and Pattern.of(split["layout"]).counts == tuple(split["layers"])
    assert main([*plan, "--balance", text]) == 0
    said = capsys.readouterr().out
    assert f"--hybrid-layer-pattern '{split['layout']}'" in said and "makespan of the split as written" in said
    assert "needs what each letter takes: give --costs of mpipe costs --by-layer" in refusal(
        capsys, *plan[:-2], "--balance", text
    )
    assert "*-x with x: known are M" in refusal(capsys, *plan, "--balance", "*-x")
    other = f"--balance {OTHER}: costs are of {PATTERN}: give those of this pattern, of mpipe costs --by-layer"
    assert other in refusal(capsys, *plan, "--balance", OTHER)


def test_memory_plans_as_many_microbatches_as_tuning() -> None:
    """Searched orders of other numbers hold other amounts: the two commands said 75.2 and 76.0 GiB of one file."""
    prediction = of(f"{NEMOTRON} --global-batch-size 512 --pipeline-schedule v-half --hybrid-layer-pattern {PATTERN}")
    variant = Variant("v-half")
    candidate = Candidate(prediction.args | {"global_batch_size": 512}, {}, variant, tuple(prediction.layers))
    planned = CandidateCosts(Cluster(H100, 8, 8), candidate).planned_microbatches
    assert prediction.schedule.microbatches == planned < prediction.microbatches == 512


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_costs_of_letters_from_a_file_balance_a_training(
    schedule: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Here attention takes ten times as long as predicted."""
    file, flags = tmp_path / "layers.json", f"{NEMOTRON} --pipeline-schedule {schedule} --pipeline-memory-limit 2"
    assert (
        main(["costs", "--gpu", "H100-80GB", "--by-layer", "-o", str(file), *NEMOTRON.split(), "--hybrid-layer-pattern", PATTERN])
        == 0
    )
    data = json.loads(file.read_text())
    for letter, stage in zip(PATTERN, data["stages"][1:-1], strict=True):
        stage["forward"] *= 10 if letter == "*" else 1
    file.write_text(json.dumps(data))
    given, costs = ("--pipeline-costs", str(file)), Costs.from_json(file.read_text())
    of_prediction, of_file = (of(flags, *more, "--hybrid-layer-pattern", PATTERN) for more in ((), given))
    placement, model = of_file.schedule.placement, Model.by_layer(costs, Pattern.of(PATTERN))

    def most(layers: list[int]) -> float:
        return heaviest(layers, placement, model.extra(placement), [layer.total for layer in model.layers])

    assert most(of_file.layers) < most(of_prediction.layers) * 0.95
    settings = of_file.args
    assert plan_pipeline(settings).plans.costs == model.cut(of_file.layers)
    written = Pattern.of(PATTERN).cut([6] * 4 + [7] * 4 if schedule == "zb-v" else [13] * 4)
    assert plan_pipeline(of(flags, *given, "--hybrid-layer-pattern", written).args).plans.costs == model.cut(
        Pattern.of(written).counts
    )
    with pytest.raises(ValueError, match=re.escape(f"--hybrid-layer-pattern {OTHER}: costs are of {PATTERN}: give those of")):
        of(flags, *given, "--hybrid-layer-pattern", OTHER)
    with pytest.raises(ValueError, match=re.escape(f"{file} is of the letters {PATTERN}, and this model has none")):
        of(flags, *given, "--num-layers", "52")
