"""Origin of measured costs: what a ``costs.json`` says beside its numbers, and the GPU that follows from both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple, TypeVar

from megatron.pipeline.planner.costmodel.device import Device, Precision
from megatron.pipeline.planner.costmodel.estimate import computing_seconds
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.reading import parse_json
from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.gpt import Shape, Work
from megatron.pipeline.planner.shape.stages import numbers_of_layers

_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "seq_length", "num_experts")
_RANKS = ("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")
_HOW = "micro_batch_size", "transformer_impl", "recompute_granularity"
MAKE = "mpipe rehearse -- FLAGS writes one, and so does a training with --pipeline-costs profile"


_Products = TypeVar("_Products", Device, Precision)


class Rehearsed(NamedTuple):
    """Entries of a costs file.

    Attributes:
        of: as ``described`` wrote it; empty in a file of other origin.
    """

    costs: Costs
    of: Mapping[str, Any]

    @property
    def gpu(self) -> str:
        """Name that CUDA gives the GPU; empty where it was a processor, or is not known."""
        return str(self.of.get("gpu") or "")


def described(model: ModelDescription, collectives: str, layers: Sequence[int], gpu: str | None = None) -> dict[str, Any]:
    """Describe the training that costs are of, for ``read``.

    Args:
        collectives: of tensor, context and expert parallelism, where there are any: ``run``; or ``predicted``, where nothing was
            measured.
        layers: of every stage.
        gpu: that was measured, by CUDA's name.
    """
    return {name: getattr(model, name) for name in (*_SIZES, *_RANKS, *_HOW)} | {
        "numbers": _numbers(model),
        "collectives": collectives if collectives == "predicted" or model.shares_layers else "none",
        "layers": list(layers),
        "gpu": gpu,
    }


def _numbers(model: ModelDescription) -> str:
    quantized = f" fp8 {model.fp8_recipe}" if model.fp8 else f" fp4 {model.fp4_recipe}" if model.fp4 else ""
    return ("bf16" if model.bf16 else "fp16" if model.fp16 else "fp32") + quantized


def read(text: str) -> Rehearsed:
    """Costs, and of which training they are.

    Raises:
        ValueError: as ``Costs.from_json``; or ``of`` is no object.
    """
    costs, of = Costs.from_json(text), parse_json(text, "costs").get("of", {})
    if not isinstance(of, dict):
        raise ValueError(f"of: expected the sizes of a training by name, got {of!r}")
    return Rehearsed(costs, of)


def measured(gpu: Device, model: ModelDescription, run: Rehearsed) -> tuple[Device, Work, Work]:
    """The GPU on which a run measured F, B and W of the layers of a model; what they took, and by the formulas of ``gpu``.

    Its efficiencies are such that a layer's passes take as long together as they did, and its ``times`` such that each does.

    Args:
        gpu: whose memory, links and peaks count.
        model: the same model in any layout.

    Raises:
        ValueError: the file does not say what a layer takes, or is of another model.
    """
    check(run, model)
    stages = _inner_stages(run.costs, numbers_of_layers(run.of["layers"]))
    count = sum(len(numbers) for _, numbers in stages)
    took = Work(*(sum(getattr(stage, name) for stage, _ in stages) / count for name in Work._fields))
    alone: dict[str, Any] = dict.fromkeys((*_RANKS, "expert_tensor_parallel_size"), 1) | {name: run.of[name] for name in _HOW}
    shape = Shape.of(replace(model, **alone, sequence_parallel=False))

    def of_layer(device: Device) -> Work:
        each = (computing_seconds(shape.of_layers(numbers), device).times(len(numbers) / count) for _, numbers in stages)
        return reduce(Work.plus, each)

    predicted = of_layer(gpu)
    faster, precision = predicted.total / took.total, shape.quantized.recipe.peak if shape.quantized else ""

    def scaled(products: _Products, name: str) -> _Products:
        lent = products.lent if name != precision else ""
        return replace(products, efficiency=min(1.0, faster * products.efficiency), lent=lent)

    others = tuple(scaled(one, one.name) for one in gpu.precisions)
    source = f"{gpu.source}; F, B and W of a layer were measured{f' on {run.gpu}' if run.gpu else ''}"
    whole = replace(scaled(gpu, ""), attention=faster * gpu.attention, moved=faster * gpu.moved)
    found = replace(whole, precisions=others, source=source)
    forward, backward, weight = (one / other for one, other in zip(took, of_layer(found), strict=True))
    return replace(found, forward=forward, backward=backward, weight=weight), took, predicted


def check(run: Rehearsed, model: ModelDescription) -> None:
    """That a file says what was measured, of this model, and has the time of its computation alone: links add what ranks of a
    layer exchange.

    Raises:
        ValueError: it does not, is of another one, or has more.
    """
    of, stages = run.of, len(run.costs.stages)
    needed = (*_SIZES, *_HOW, "numbers", "collectives", "layers")
    if lacking := [name for name in needed if name not in of]:
        raise ValueError(f"the file does not say of which training its costs are (no {lacking[0]}): {MAKE}")
    if not (isinstance(of["layers"], list) and len(of["layers"]) == stages and all(type(count) is int for count in of["layers"])):
        raise ValueError(f"layers: expected those of each of {stages} stages, got {of['layers']!r}")
    if of["collectives"] == "predicted":
        raise ValueError(f"its seconds were predicted, not measured: {MAKE}")
    wanted = {f"--{name.replace('_', '-')}": (of[name], getattr(model, name)) for name in _SIZES}
    wanted["numbers"] = of["numbers"], _numbers(model)
    if other := [f"{name} {its}, not {ours}" for name, (its, ours) in wanted.items() if its != ours]:
        raise ValueError(f"the file is of {', '.join(other)}: give the flags of its training, or the file of this one")
    if of["collectives"] != "none":
        raise ValueError(
            "its seconds contain what ranks of a layer exchange, which a prediction adds by the links: measure with "
            "--tensor-model-parallel-size, --context-parallel-size and --expert-model-parallel-size 1"
        )
    if of["recompute_granularity"]:
        raise ValueError("its backwards make activations again, which a prediction adds: measure without --recompute-granularity")


def _inner_stages(costs: Costs, numbers: Sequence[range]) -> list[tuple[StageCosts, range]]:
    """Stages between the first and the last, which have other work besides, with the numbers of their layers.

    Raises:
        ValueError: they are too few, or have no W.
    """
    inner = [(stage, own) for stage, own in [*zip(costs.stages, numbers, strict=True)][1:-1] if own]
    if not inner:
        raise ValueError(
            f"{len(costs.stages)} stages, and the first and the last have embedding and output layer besides: measure with 3 "
            "stages or more, as --pipeline-schedule zb-v has on 2 ranks"
        )
    if not all(stage.forward > 0 and stage.backward > 0 and stage.weight > 0 for stage, _ in inner):
        raise ValueError(
            "F, B and W must each take time, and some take none: measure a schedule that splits the backward, as zb-h1"
        )
    return inner
