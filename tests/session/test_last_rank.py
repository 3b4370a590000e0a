"""Reports of the loss function, from the rank with the last stage of a V to the last rank."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_runs import example, optimizer_of, steps
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import utils
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.pipeline.patches import model_bridge
from pool import Pool
from session.own_loops import refused
from torch.utils._pytree import tree_map

from megatron.pipeline import install
from megatron.pipeline.planner.planning import plan
from megatron.pipeline.planner.schedule.core.placement import v
from megatron.pipeline.session.last_rank import LastRank


def brought(forms: list[list[Any]]) -> list[list[Any]]:
    """What this rank has of reports that the rank with the last stage of a V gives, one after the other."""
    parallel_state.initialize_model_parallel(1, 4, 2)
    group, last_rank, found = parallel_state.get_pipeline_model_parallel_group(), LastRank(v(4)), []
    for form in forms:
        reports = list(form) if group.rank() == 0 else []
        last_rank.bring(reports, group)
        found.append(reports)
    return found


def ends(schedule: str, layout: str | None = None) -> tuple[list[tuple[bool, bool]], list[list[int]]]:
    """By chunk whether it is the first and whether it is the last, by each way to ask, and numbers of its layers, from 0."""
    install(schedule)
    parallel_state.initialize_model_parallel(1, 4, 2)
    group, told = parallel_state.get_pipeline_model_parallel_group(), []
    for chunk in range(2):
        where = {"ignore_virtual": False, "vp_stage": chunk}
        told.append((parallel_state.is_pipeline_first_stage(**where), parallel_state.is_pipeline_last_stage(**where)))
        first = utils.is_vp_first_stage(vp_stage=chunk, vp_size=2) and utils.is_pp_first_stage(group)
        told.append((first, utils.is_vp_last_stage(chunk, 2) and utils.is_pp_last_stage(group)))
    assert parallel_state.is_pipeline_last_stage() == (group.rank() == 3), "as ever"
    assert utils.is_pp_last_stage(group) == (group.rank() == 3 or told[2][1])
    config = TransformerConfig(
        num_layers=16,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype=torch.float32,
        num_moe_experts=2,
        moe_layer_freq=2,  # every second layer, so that builders ask for the numbers of layers
        add_bias_linear=False,
    )
    layers = []
    for chunk in range(2):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=chunk)
        block = TransformerBlock(config, spec, vp_stage=chunk)
        layers.append([layer.layer_number - 1 for layer in block.layers])
        experts = [hasattr(layer.mlp, "router") for layer in block.layers]
        assert experts == [number % 2 == 0 for number in layers[-1]], "kinds of layers"
    return told, layers


def turned() -> Any:
    """An interleaved schedule whose last two ranks have changed places."""
    schedule = plan("interleaved", 4, 8)
    order = [0, 1, 3, 2]
    placement = replace(schedule.placement, stages=tuple(schedule.placement.stages[rank] for rank in order))
    return replace(schedule, placement=placement, passes=tuple(schedule.passes[rank] for rank in order))


def ends_refused(schedule: str) -> str:
    own = example("own_training_loop")
    install(schedule)
    parallel_state.initialize_model_parallel(1, 4, 2)
    return refused(lambda: own.build(share_embeddings_and_output_weights=True))


def tied(schedule: str, into_one_end: bool = False, by_bridge: bool = False) -> Any:
    """Steps of a model whose output layer is tied to the embedding; the refusal where one of both has got other weights.

    Args:
        by_bridge: Megatron Bridge loads the embedding, and then sends it to the last rank.
    """
    own, bridge = example("own_training_loop"), types.ModuleType(model_bridge._PATH)
    bridge.MegatronModelBridge = type("Bridge", (), {model_bridge._NAME: sends})  # type: ignore[attr-defined]
    sys.modules |= {bridge.__name__: bridge} if by_bridge else {}
    own.plan(schedule)
    models = own.build(share_embeddings_and_output_weights=True)
    ends = [model.shared_embedding_or_output_weight() for model in models if model.pre_process or model.post_process]
    sys.modules.pop(bridge.__name__, None)
    for weight in ends[:1] if by_bridge else ends:
        weight.data.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    chunks = own.wrap(models)
    if by_bridge:
        getattr(bridge.MegatronModelBridge(), model_bridge._NAME)(chunks)
    if not into_one_end:
        return steps(chunks)
    for weight in ends[:1]:
        weight.data.add_(1)
    return refused(lambda: own.run(chunks, own.batches(4, seed=0), optimizer_of(chunks)))


def sends(_bridge: Any, _model: Any) -> None:
    """As Megatron Bridge's method, which looks for the last stage on the last rank."""
    raise AssertionError("Output layer not found")


FORMS: list[list[Any]] = [
    [{"loss": torch.tensor([1.5, 2**53 + 1], dtype=torch.float64), "tokens": torch.tensor([2**62 + 1, 3])}],
    [{"loss": torch.tensor([2.5, -1.0], dtype=torch.float64), "tokens": torch.tensor([5, 6])}],  # of the same form
    [(torch.arange(7, dtype=torch.bfloat16).view(7, 1), "a word", 3, torch.empty(0)), None],
    [],
    [{"log_probs": torch.rand(3, 5), "kept": torch.tensor([True, False])}] * 3,
    [{"log_probs": torch.nested.nested_tensor([torch.rand(length) for length in (3, 1, 4)], layout=torch.jagged)}] * 2,
]


def bits(reports: list[Any]) -> Any:
    def of(leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        return leaf.dtype, [row.tolist() for row in leaf.unbind()] if leaf.is_nested else leaf.tolist()

    return tree_map(of, reports)


def test_what_is_reported_arrives_with_its_bits(pool: Pool) -> None:
    home, *between, last = pool.run(4, brought, FORMS)
    assert between == [[[]] * len(FORMS)] * 2
    for sent, own, arrived in zip(FORMS, home, last, strict=True):
        assert bits(own) == bits(sent) == bits(arrived)


def test_a_loop_sees_the_ends_of_a_v_where_they_are(pool: Pool) -> None:
    for rank, (told, layers) in enumerate(pool.run(4, ends, "zb-v")):
        # By chunk: the first, the last, by both of megatron-core's ways to ask.
        assert told == [(rank == 0, False)] * 2 + [(False, rank == 0)] * 2
        # Without a chunk: reports are on the last rank, as ever, and on the one with the last stage.
        assert layers == [[2 * rank, 2 * rank + 1], [14 - 2 * rank, 15 - 2 * rank]]
    for rank, (told, layers) in enumerate(pool.run(4, ends, "interleaved")):
        assert told == [(rank == 0, False)] * 2 + [(False, rank == 3)] * 2
        assert layers == [[2 * rank, 2 * rank + 1], [8 + 2 * rank, 9 + 2 * rank]]


def test_layers_of_a_layout_stay_in_its_stages(pool: Pool) -> None:
    found = pool.run(4, ends, "zb-v", "Et|tt|tt|ttt|tt|tt|tt|ttL")
    assert [layers for _, layers in found] == [
        [[0], [14, 15]], [[1, 2], [12, 13]], [[3, 4], [10, 11]], [[5, 6, 7], [8, 9]]
    ]  # fmt: skip


def test_tied_ends_on_two_ranks_that_megatron_core_has_no_group_for_are_refused(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(turned().to_json(), encoding="utf-8")
    found = pool.run(4, ends_refused, f"file:{path}")
    assert found[1] == found[3] == ""
    assert "output layer on rank 2, and the model ties it to the embedding on rank 0" in found[0] and found[2] == found[0]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_tied_ends_train_as_under_stock(pool: Pool, schedule: str) -> None:
    stock, ours = pool.each(4, tied, ("stock", schedule))
    assert [losses for losses, _ in ours[-1]] == [losses for losses, _ in stock[-1]]
    assert [norm for _, norm in ours[-1]] == pytest.approx([norm for _, norm in stock[-1]], rel=1e-6)
    if schedule == "zb-v":  # a load by Megatron Bridge reaches both ends
        assert pool.run(4, tied, schedule, False, True) == ours


def test_tied_ends_that_differ_are_refused_on_every_rank(pool: Pool) -> None:
    messages = pool.run(4, tied, "zb-v", True)
    assert len(set(messages)) == 1 and "tied to the embedding, and their weights differ" in messages[0]
