"""Layouts of experts: their parts in costs, with and without the overlap of all-to-alls, and multi-latent attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tune.small import A100, FLAGS, candidate, layouts, result

from megatron.pipeline.cli.memory import predicted, quietly
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.validation import validate
from megatron.pipeline.flags.validation_hybrid import check_latent
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.planner.costmodel.activations import layer_activation, layer_checkpoint
from megatron.pipeline.planner.costmodel.device import Link
from megatron.pipeline.planner.costmodel.estimate import estimate, layer_parts
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.costmodel.memory import expert_copies
from megatron.pipeline.planner.costmodel.parameters import layer_parameters
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.stage_costs import PARTS
from megatron.pipeline.planner.shape.activation_policy import ActivationPolicy
from megatron.pipeline.planner.shape.experts import Experts
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.latent import Latent
from megatron.pipeline.tune.candidate import Candidate
from megatron.pipeline.tune.costs import CandidateCosts
from megatron.pipeline.tune.iteration import Result, evaluate, least_seconds
from megatron.pipeline.tune.layouts import OVERLAP, Layouts
from megatron.pipeline.tune.write import extras, write_config

EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 4096 --disable-bias-linear --swiglu"
# Nodes of one GPU with slow cards: all-to-alls take a fifth of a forward.
SLOW = replace(A100, between=Link(1.5e-5, 20e9))
LATENT = Latent(1536, 512, 64, 128)
OF_DEEPSEEK = Experts((True,) * 4, 256, 8, 2048, 2048, 18432, parallel=8)
# DeepSeek-V3's layer: 128 heads, and 256 experts of which a token visits 8.
DEEPSEEK = Shape(
    4, 7168, 128, 128, 192, 9 * 2048, True, 4096, 1, 1024, norm=1, qk_norm=True, latent=LATENT,
    experts=OF_DEEPSEEK, policy=ActivationPolicy(hidden_masks=False),
)  # fmt: skip


@pytest.fixture(scope="module")
def slow() -> Layouts:
    graphs = "--cuda-graph-impl full_iteration"  # which spare the host: layers are small
    return layouts(f"{EXPERTS} {graphs}", gpus=8, gpu=SLOW, per_node=1, microbatch=(1,))


def both(on: Layouts, schedule: str, **changes: Any) -> tuple[Result, Result]:
    """A schedule of four stages with two expert-parallel ranks, without and with the overlap."""
    four: dict[str, Any] = {
        "pipeline_model_parallel_size": 4,
        "expert_model_parallel_size": 2,
        "moe_token_dispatcher_type": "alltoall",
    }
    without, with_ = (result(on, candidate(on, schedule, **four | changes | more)) for more in ({}, OVERLAP))
    return without, with_


def test_a_model_without_experts_on_several_ranks_has_no_parts() -> None:
    shape = Shape.plain(8, 1024, 16, 512, 1024)
    alone = replace(shape, experts=Experts((True,) * 8, 8, 2, 512, 0, 4096))
    for given in (shape, alone):
        assert layer_parts(given, A100, Links.within(A100)) == {}
        for stage in estimate(given, linear(4), [2] * 4, A100).stages:
            assert all(getattr(stage, name) is None for name in (*PARTS, "layers"))


def test_tokens_that_go_to_experts_are_kept_once_with_deepep() -> None:
    by, twice = (replace(DEEPSEEK, experts=replace(OF_DEEPSEEK, once=once)) for once in (True, False))
    assert layer_activation(twice) - layer_activation(by) == pytest.approx(2 * 4096 * 8 * 7168)
    whole = ActivationPolicy(recomputed=frozenset({"moe"}))  # leaves as much of both
    assert layer_checkpoint(replace(by, policy=whole)) == pytest.approx(layer_checkpoint(replace(twice, policy=whole)))


def test_latent_attention_has_the_published_weights() -> None:
    """187.1 million in a layer: two to and from 1536 for queries, two to and from 512 for keys and values, and the output's."""
    down, up = 7168 * (1536 + 512 + 64), 1536 * 128 * 192 + 512 * 128 * 256
    attention = down + up + 128 * 128 * 7168
    assert DEEPSEEK.latent_weights + DEEPSEEK.cut_attention_weights == attention == 187_105_280
    router, norms = 256 * 7168, 2 * 7168 + 1536 + 512
    assert layer_parameters(DEEPSEEK, 0).dense == attention + 3 * 7168 * 2048 + router + norms
    direct = replace(DEEPSEEK, latent=replace(LATENT, queries=None))
    assert direct.latent_weights + direct.cut_attention_weights == 7168 * (128 * 192 + 576) + 512 * 128 * 256 + 128 * 128 * 7168
    cut = replace(DEEPSEEK, policy=ActivationPolicy(tensor=4, sequence_parallel=True))
    shared = layer_parameters(cut, 0).dense - router - norms
    assert shared == down + (attention - down + 3 * 7168 * 2048) // 4, "each rank has all that makes narrow vectors"


def test_every_layout_is_tried_without_and_with_the_overlap_where_training_allows_it(slow: Layouts) -> None:
    layout = {"pipeline_model_parallel_size": 4, "micro_batch_size": 1, "expert_model_parallel_size": 2}

    def key(one: Candidate) -> tuple[Any, ...]:
        return one.variant, one.args.vocabulary.spread, one.layers

    ours, stock = (list(slow.candidates(layout, stock)) for stock in (False, True))
    for found, allowed in ((ours, lambda one: one.args.vocabulary.spread is None), (stock, lambda one: one.variant.chunks)):
        without = {key(one) for one in found if not one.overlaps and allowed(one)}
        assert without and {key(one) for one in found if one.overlaps} == without
    assert not any("--overlap-moe" in reason for reason in slow.refused)
    for one in (*ours, *stock):
        assert one.args.moe_token_dispatcher_type == ("alltoall" if one.overlaps else "allgather"), (
            "what was given, or what works"
        )
    alone = layout | {"expert_model_parallel_size": 1}
    assert not any(one.overlaps for one in slow.candidates(alone, stock=False))
    dense = layouts(gpus=8, microbatch=(1,))
    assert not any(one.overlaps for one in dense.candidates(alone, stock=False))


@pytest.mark.parametrize("schedule", ["interleaved", "v-auto"])
def test_the_overlap_saves_time(slow: Layouts, schedule: str) -> None:
    without, with_ = both(slow, schedule)
    assert with_.seconds < without.seconds and with_.parts.messages < without.parts.messages
    flag = "overlap-moe-expert-parallel-comm"
    assert flag in extras(with_) and flag not in extras(without)
    for one in (without, with_):
        assert one.parts.total == pytest.approx(one.seconds) and one.parts.messages > 0
        assert least_seconds(CandidateCosts(slow.cluster, one.candidate)) <= one.seconds
    assert with_.costs == without.costs, "the same layers"
    middle = [one.ranks[1].temporary for one in (without, with_)]
    assert middle[0] < middle[1], "all-to-alls of one microbatch need theirs while another computes"


def test_stock_holds_a_chunk_more_under_its_own_order(slow: Layouts) -> None:
    without, with_ = both(slow, "interleaved", stock=True, chunks=2, global_batch_size=32)
    chunk = max(stage.activation for stage in with_.costs.stages[1:-1])
    more = [a.activations - b.activations for a, b in zip(with_.ranks, without.ranks, strict=True)]
    assert more[1:-1] == pytest.approx([chunk] * 2)
    assert with_.parts.messages < without.parts.messages


def test_where_memory_is_short_the_order_that_holds_less_is_taken(slow: Layouts) -> None:
    """And training gets the limit, so that it takes the same."""
    without, with_ = both(slow, "interleaved")
    assert max(rank.total for rank in with_.ranks) > max(rank.total for rank in without.ranks), "megatron-core's order"
    enough = without.fullest.total + with_.fullest.temporary - without.fullest.temporary
    assert enough < with_.fullest.total
    short = replace(slow.cluster, device=replace(SLOW, memory=enough))
    found = evaluate(short, with_.candidate)
    assert isinstance(found, Result) and found.fullest.total <= enough and found.memory_limit
    assert with_.seconds <= found.seconds <= without.seconds * (1 + 1e-9)


def test_gradients_of_experts_are_summed_over_ranks_with_the_same_ones(slow: Layouts) -> None:
    some: dict[str, Any] = {"pipeline_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    found = {}
    for parallel, copies in ((1, 4), (2, 2), (4, 1)):
        one = candidate(slow, "1f1b", expert_model_parallel_size=parallel, **some)
        assert expert_copies(describe(one.args)) == copies
        costs = (two := CandidateCosts(slow.cluster, one)).costs
        plan = Request("1f1b", 2, 4, costs, objective=one.objective).plan()
        found[parallel] = two.between(plan.schedule, plan.value)
    assert found[1] > found[2] > found[4]


def test_what_is_found_is_what_training_plans(slow: Layouts, tmp_path: Path) -> None:
    with_ = both(slow, "interleaved")[1]
    path = tmp_path / "best.yaml"
    write_config(with_, [*FLAGS.split(), *EXPERTS.split()], path, "found")
    written = yaml.safe_load(path.read_text())
    assert written["overlap-moe-expert-parallel-comm"] is True and written["moe-token-dispatcher-type"] == "alltoall"
    again = predicted(["--config", str(path)], world_size=8)
    kinds = {work.kind for row in again.schedule.passes for work in row}
    assert kinds & {Kind.FB, Kind.FBW}
    assert again.args.overlap_moe_expert_parallel_comm
    assert [rank.total for rank in again.ranks] == pytest.approx([rank.total for rank in with_.ranks])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"multi_latent_attention": False}, "--q-lora-rank, --kv-lora-rank, .* without --multi-latent-attention"),
        ({"kv_lora_rank": None, "v_head_dim": None}, "needs --kv-lora-rank, --v-head-dim"),
        ({"group_query_attention": True}, "leave --group-query-attention out"),
        ({"qk_pos_emb_head_dim": 63}, "--qk-pos-emb-head-dim 63"),
    ],
)
def test_flags_of_latent_attention_that_contradict_each_other(changes: dict[str, Any], match: str) -> None:
    args = parse(["--config", str(Path(__file__).parents[2] / "configs" / "deepseek_v3" / "671B.yaml"), "--mock-data"])
    with quietly():
        settings = validate(args, 256)
    with pytest.raises(ValueError, match=match):
        check_latent(settings | changes)


def test_flags_give_the_shape_of_latent_attention() -> None:
    path = Path(__file__).parents[2] / "configs" / "deepseek_v3" / "671B.yaml"
    shape = shape_of(predicted(["--config", str(path), "--global-batch-size", "32"], 16).args)
    assert (shape.latent, shape.heads, shape.head_width, shape.queries, shape.attended) == (LATENT, 128, 192, 24576, 16384)
    assert shape.experts and sum(shape.experts.layers) == 58 and not any(shape.experts.layers[:3])


@pytest.mark.parametrize(
    ("flags", "load"),
    [("", 1), ("--moe-load-factor 1.4", 1.4), ("--moe-load-factor 1.4 --moe-expert-capacity-factor 1.25", 1.25),
     ("--moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity", 2)],
)  # fmt: skip
def test_capacity_limits_the_load(flags: str, load: float) -> None:
    line = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 1 --num-experts 8 "
    more = f"--tokenizer-type NullTokenizer --vocab-size 1000 --global-batch-size 4 --pipeline-schedule stock {flags}"
    experts = shape_of(predicted([*line.split(), *more.split()]).args).experts
    assert experts and experts.load == load
