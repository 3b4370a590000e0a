"""Models of every kind that a prediction knows, drawn at random; a seed always draws the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

from megatron.pipeline.planner.shape.activation_policy import ActivationPolicy
from megatron.pipeline.planner.shape.experts import Experts
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.hybrid import Hybrid
from megatron.pipeline.planner.shape.latent import Indexer, Latent
from megatron.pipeline.planner.shape.mixer import Mixer
from megatron.pipeline.planner.shape.precision import RECIPES, Quantized
from megatron.pipeline.planner.shape.windows import Windows

Value = TypeVar("Value")
POWERS = (1, 2, 4, 8)
RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
MIXER = Mixer(2336, 2048, 4096, 23000, 600000, 1800000, 30000, 90000)


def shape(draw: Random) -> Shape:
    layers, seq, tensor = draw.randint(4, 12), draw.choice([512, 4096]), draw.choice(POWERS)
    experts = _experts(draw, layers, tensor) if draw.random() < 0.5 else None
    kind, recipe = draw.choice(["attention", "attention", "latent", "hybrid"]), draw.choice([None, *RECIPES])
    drawn = Shape(
        layers,
        hidden=1024,
        heads=16,
        groups=draw.choice([4, 16]),
        head_width=96 if kind == "latent" else 64,
        ffn=experts.mean_ffn if experts else 4096,
        gated=_either(draw),
        seq=seq,
        microbatch=draw.randint(1, 4),
        vocabulary=draw.choice([1024, 128 * 1024]),
        norm=draw.choice([1, 2]),
        biases=_either(draw),
        qkv_bias=_either(draw),
        qk_norm=_either(draw),
        positions=draw.choice([0, seq]),
        mtp_layers=draw.randint(0, 1),
        experts=experts,
        latent=_latent(draw) if kind == "latent" else None,
        policy=_policy(draw, tensor),
        quantized=Quantized(RECIPES[recipe], _each(draw, layers, (False, True))) if recipe else None,
        windows=Windows(_each(draw, layers, (257, seq))) if kind == "attention" and _either(draw) else None,
        hybrid=_hybrid(draw, layers, experts) if kind == "hybrid" else None,
    )
    routed = experts.mean_routed_ffn if experts else 0.0
    return replace(drawn, ffn=drawn.share("-") * 4096 + routed) if drawn.hybrid else drawn


def _experts(draw: Random, layers: int, tensor: int) -> Experts:
    gathered, once = draw.choice([(False, False), (True, False), (False, True)])
    part = draw.choice([1, tensor])
    return Experts(
        _each(draw, layers, (False, True)), 16, draw.randint(1, 8), 256, draw.choice([0, 512]), 1024, draw.choice(POWERS), part,
        gathered, once, draw.choice([1.0, 1.5]), _either(draw), _either(draw),
        draw.choice([None, 256]),
    )  # fmt: skip


def _latent(draw: Random) -> Latent:
    return Latent(draw.choice([None, 384]), 128, 32, 64, Indexer(8, 64, 256) if _either(draw) else None)


def _policy(draw: Random, tensor: int) -> ActivationPolicy:
    return ActivationPolicy(
        tensor=tensor, context=draw.choice(POWERS), sequence_parallel=tensor > 1 and _either(draw),
        attention_matrices=_either(draw), wide_softmax=_either(draw), fused_norms=_either(draw), hidden_masks=_either(draw),
        recomputed=frozenset(one for one in RECOMPUTED if draw.random() < 0.3), recompute_layers=draw.choice([0, 0, 1, 3]),
        recompute_first=_either(draw), native_loss=_either(draw), attention_masks=_either(draw),
        graphed=draw.choice([frozenset(), frozenset(("attn", "moe_router"))]),
    )  # fmt: skip


def _hybrid(draw: Random, layers: int, experts: Experts | None) -> Hybrid:
    """With experts in the layers that have them."""
    has = experts.layers if experts else (False,) * layers
    return Hybrid(tuple("E" if one else draw.choice("M*-") for one in has), (), (("M", MIXER),))


def _each(draw: Random, layers: int, values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(draw.choice(values) for _ in range(layers))


def _either(draw: Random) -> bool:
    return draw.random() < 0.5
