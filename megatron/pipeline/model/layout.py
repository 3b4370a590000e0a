"""Number and place of the layers of every stage: megatron-core's layout of the layers, for any placement."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.pipeline.model.adapter import GPT, ModelAdapter
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.planner import (
    STOCK,
    Costs,
    Device,
    Links,
    Placement,
    balance,
    balanced_by_weight,
    counted,
    estimate,
    flag_of,
    hybrid,
    interleaved,
    rank_memory,
    reading,
)

__all__ = ["PlacementLayout", "stage_layers"]

# Behind an earlier stage messages have another shape, and it has a third copy of the embedding.
EARLY_PREDICTION = "under schedules of ours they belong into the last stage, before its L (stock trains them where they are)"

_OF_STAGES = (
    *(f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")),
    *(f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")),
)


class PlacementLayout(PipelineParallelLayerLayout):
    """megatron-core's layout object, which knows interleaved placements only, for any other as well.

    Args:
        stages: the layers of every stage of the model, in the model's order.
        placement: which rank and chunk has which stage.
        given: whether the user has said where stages end.
    """

    def __init__(self, stages: Sequence[Sequence[LayerType]], placement: Placement, given: bool = False) -> None:
        super().__init__([list(stage) for stage in stages], placement.ranks)
        self.homes = placement.stages  # plain tuples: frameworks copy what a configuration has, attribute by attribute
        self.stages, self.given = tuple(map(tuple, stages)), given
        self.layout = [[list(stages[stage]) for stage in row] for row in placement.stages]

    @property
    def layers(self) -> int:
        """Number of transformer layers."""
        return sum(stage.count(LayerType.decoder) for stage in self.stages)

    def segment(self, pattern: str, pp_group: Any, vp_stage: int | None, *_: Any, **__: Any) -> tuple[list[str], int]:
        """The letters of a chunk of ``HybridModel``, and how many are before it.

        Args:
            pattern: of the whole model, without what predicts further tokens.
        """
        rank = torch.distributed.get_rank(pp_group)
        first = self.get_layer_offset(vp_stage=vp_stage, pp_rank=rank)
        count = self.stages[self.homes[rank][vp_stage or 0]].count(LayerType.decoder)
        return list(pattern.replace("|", "")[first : first + count]), first

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Number of layers of a type on the stages before this one."""
        rank = parallel_state.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        before = self.stages[: self.homes[rank][vp_stage or 0]]
        return sum(stage.count(layer_type) for stage in before)


def decoder_layers(args: Namespace, placement: Placement) -> list[int]:
    """Transformer layers of every stage, in the model's order; raises what ``stage_layers`` does."""
    return [stage.count(LayerType.decoder) for stage in stage_layers(args, placement)]


def stage_layers(args: Namespace, placement: Placement, adapter: ModelAdapter = GPT) -> tuple[tuple[LayerType, ...], ...]:
    """Contents of every stage of the model, in the model's order, from Megatron-LM's flags.

    ``--pipeline-model-parallel-layout`` says it all. Otherwise layers are spread evenly; those left over go to the ranks that
    have the fewest, and there to the stages in the middle, since the first has the embedding and the last the output layer.
    ``--num-layers-in-first-pipeline-stage``
    (``last``) fixes the first (last) stage of the model, or with an interleaved placement of several chunks all of the first
    (last) rank's, as in Megatron-LM. ``--account-for-embedding-in-pipeline-split`` (``loss``) counts it as a layer.
    ``--layer-redistribution`` makes the heaviest rank as light as it can be, given ``last_stage_in_layers``.

    Of ``--hybrid-layer-pattern`` every letter is a layer: ``|`` says where stages end, and without them they are balanced by what
    layers take (``balanced_by_cost``). Under megatron-core's own schedule, which knows no such balance, they are even.

    Raises:
        ValueError: the flags contradict each other or do not fit the number of layers and stages.
    """
    if args.pipeline_model_parallel_layout:
        return _given_layout(args, placement)
    fixed = _fixed_layers(args, placement)
    accounts = args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split
    if fixed and any(accounts):
        raise ValueError(
            "--num-layers-in-first-pipeline-stage and --num-layers-in-last-pipeline-stage say how many layers the ends have, and "
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split let it be computed: give one kind"
        )
    pattern = hybrid.Pattern.of(args.hybrid_layer_pattern) if getattr(args, "hybrid_layer_pattern", None) else None
    if pattern and len(pattern.counts) > 1:
        return tuple(map(tuple, adapter.layers(args, _written(args, pattern, placement))))
    try:
        if balances_letters(args):
            numbers = balanced_by_cost(args, placement)
        elif args.vocabulary.redistributes:
            numbers = balanced_by_weight([1.0] * args.num_layers, placement, last_stage_in_layers(args, placement, adapter))
        else:
            embedding, loss = map(int, accounts)
            extra = {0: embedding} if placement.last_stage == 0 else {0: embedding, placement.last_stage: loss}
            numbers = _even_layers(args.num_layers, placement, fixed, extra)
    except ValueError as error:
        given = f"--hybrid-layer-pattern {pattern}" if pattern else f"--num-layers {args.num_layers}"
        raise ValueError(f"{given} {error}") from None
    return tuple(map(tuple, adapter.layers(args, numbers)))


def balances_letters(args: Namespace) -> bool:
    """Tell whether stages of letters are balanced by what these take: nothing else says where they end."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    said = [getattr(args, name) for name in _OF_STAGES]
    return bool(pattern and "|" not in pattern and not any(said) and args.pipeline.schedule != STOCK)


def _even_layers(layers: int, placement: Placement, fixed: Mapping[int, int], extra: Mapping[int, int]) -> list[int]:
    """Layers of every stage, in the model's order, as evenly as they can be spread.

    Those left over go to the ranks that have the fewest, and there to the stages in the middle.

    Args:
        fixed: layers of the stages whose number is given.
        extra: what else a stage has that counts as layers.

    Raises:
        ValueError: there are fewer layers than stages that need one, or some are left.
    """
    count = placement.last_stage + 1
    free = [stage for stage in range(count) if stage not in fixed]
    left = layers - sum(fixed.values()) + sum(extra.values())
    each, over = divmod(left, len(free)) if free else (0, 0)
    if left < len(free) or (not free and left):
        raise ValueError(
            f"cannot be split over {placement.ranks} pipeline ranks x "
            f"{counted(placement.chunks, 'chunk')} = {count} stages"
            + (f" of which {len(fixed)} have {sum(fixed.values())} layers" if fixed else "")
            + f": {left} are left for {len(free)} stages; change their number or --pipeline-model-parallel-size"
        )
    numbers = {**fixed, **dict.fromkeys(free, each)}
    roomy = sorted(free, key=lambda stage: -min(stage, count - 1 - stage))
    for _ in range(over):
        lightest = min(roomy, key=lambda stage: sum(numbers[other] for other in placement.stages[placement.home(stage)[0]]))
        numbers[lightest] += 1
        roomy.remove(lightest)
    return [numbers[stage] - extra.get(stage, 0) for stage in range(count)]


def last_stage_in_layers(args: Namespace, placement: Placement, adapter: ModelAdapter = GPT) -> dict[int, float]:
    """Work of the last stage in addition to its transformer layers, in units of one such layer; by stage."""
    return {placement.last_stage: adapter.last_stage_in_layers(args)}


def balanced_by_cost(args: Namespace, placement: Placement, gpu: Device | None = None, per_node: int | None = None) -> list[int]:
    """Layers of every stage under which the rank with most to do has as little as it can, by what each layer takes.

    That is as ``letter_costs`` say, of a file (``of_letter_costs``), or as it is predicted.

    Args:
        gpu: that runs the model, on nodes of ``per_node``; by default any.

    Raises:
        ValueError: there are fewer layers than stages that need one.
    """
    if (costs := getattr(args, "letter_costs", None)) is None:
        described, gpu = describe(args), gpu or rank_memory.any_device(shape_of(args))
        costs = estimate.by_layer(described, gpu, placement.depth, Links.of_model(gpu, described, per_node))
    model = balance.Model.by_layer(costs, hybrid.Pattern.of(args.hybrid_layer_pattern))
    return balanced_by_weight([layer.total for layer in model.layers], placement, model.extra(placement))


def costs_of_letters(args: Namespace, placement: Placement) -> Costs:
    """Costs of a placement's stages, from those of letters; raises what ``stage_layers`` does."""
    model = balance.Model.by_layer(args.letter_costs, hybrid.Pattern.of(args.hybrid_layer_pattern))
    return model.cut(decoder_layers(args, placement))


def _written(args: Namespace, pattern: hybrid.Pattern, placement: Placement) -> Sequence[int]:
    """Layers of every stage, where ``|`` in a pattern ends each."""
    if others := [flag_of(name) for name in _OF_STAGES if getattr(args, name)]:
        raise ValueError(f"--hybrid-layer-pattern {pattern} says where every layer goes: leave out {' and '.join(others)}")
    with reading.NamedErrors("--hybrid-layer-pattern"):
        return pattern.on(placement.depth)


def _given_layout(args: Namespace, placement: Placement) -> tuple[tuple[LayerType, ...], ...]:
    text, stages = args.pipeline_model_parallel_layout, placement.ranks * placement.chunks
    if others := [flag_of(name) for name in _OF_STAGES if getattr(args, name)]:
        raise ValueError(f"--pipeline-model-parallel-layout says where every layer goes: leave out {' and '.join(others)}")
    try:
        rows = PipelineParallelLayerLayout.parse_str_to_list(text)
        if len(rows) == stages:
            PipelineParallelLayerLayout(rows, placement.ranks).validate_layer_layout(args.num_layers, args.mtp_num_layers)
    except (AssertionError, NotImplementedError) as error:
        raise ValueError(f"--pipeline-model-parallel-layout {text}: {error}") from None
    if len(rows) != stages:
        raise ValueError(
            f"--pipeline-model-parallel-layout {text} has {len(rows)} stages, but {placement.ranks} pipeline ranks with "
            f"{counted(placement.chunks, 'chunk')} have {stages}"
        )
    early = [stage for stage, row in enumerate(rows[:-1]) if LayerType.mtp in row]
    if early:
        raise ValueError(
            f"--pipeline-model-parallel-layout {text} has layers of --mtp-num-layers (m) in stage {early[0]}: {EARLY_PREDICTION}"
        )
    return tuple(map(tuple, rows))


def _fixed_layers(args: Namespace, placement: Placement) -> dict[int, int]:
    """The number of layers by stage, of the stages whose number is given."""
    by_rank = placement.chunks > 1 and placement == interleaved(placement.ranks, placement.chunks)
    fixed: dict[int, int] = {}
    ends = (
        ("first", args.decoder_first_pipeline_num_layers, 0, 0),
        ("last", args.decoder_last_pipeline_num_layers, placement.last_stage, placement.ranks - 1),
    )
    for which, number, stage, rank in ends:
        if number is None:
            continue
        stages = placement.stages[rank] if by_rank else (stage,)
        if number % len(stages):
            raise ValueError(
                f"--num-layers-in-{which}-pipeline-stage {number} must be a multiple of the {len(stages)} chunks of that rank"
            )
        fixed |= dict.fromkeys(stages, number // len(stages))
    return fixed
