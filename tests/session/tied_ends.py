"""What tests/session/test_last_rank.py runs on the pool: both ends of a V on one rank, and loops that look at the last."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import torch
from example_runs import example, optimizer_of, steps
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import utils
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.pipeline.patches import model_bridge
from session.own_loops import refused

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
