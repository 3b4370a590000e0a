"""Costs of the same model that is cut, spread, run or timed in another way: each function makes other ``Costs`` of some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from math import lcm
from statistics import median_low
from typing import Any

from megatron.pipeline.planner.schedule.core.costs import EQUAL_SHARDS, Costs, StageCosts, VocabularyCosts
from megatron.pipeline.planner.schedule.core.kinds import Vocabulary
from megatron.pipeline.planner.schedule.core.loads import Load
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.stage_costs import ALL_TO_ALL, PARTS, combined


def of_depth(costs: Costs, stages: int) -> Costs:
    """The costs of the same model cut into another number of stages: those here are cut evenly, and joined in their order.

    What the first and the last stage cost more than the stages between them (the embedding, the output layer) stays at the
    ends.

    Raises:
        ValueError: the costs are of a pattern's letters.
    """
    if costs.pattern:
        raise ValueError(f"these costs are of the letters {costs.pattern}, not of stages: split them, as --balance PATTERN does")
    if stages == len(costs.stages):
        return costs
    common = lcm(stages, len(costs.stages))
    parts, joined = common // len(costs.stages), common // stages
    pieces = [piece for place in range(len(costs.stages)) for piece in _parts(costs, place, parts)]
    cut = tuple(combined(sum, pieces[start : start + joined]) for start in range(0, common, joined))
    return replace(costs, stages=cut, pattern="")


def _parts(costs: Costs, place: int, parts: int) -> list[StageCosts]:
    """A stage in equal parts; what an end of the model costs more than its neighbour is in the part at that end."""
    stage, last = costs.stages[place], len(costs.stages) - 1
    if parts == 1 or place not in (0, last) or last < 2:
        return [stage.share(parts)] * parts
    plain = combined(min, [stage, costs.stages[1 if place == 0 else last - 1]]).share(parts)
    end = combined(lambda values: values[0] - (parts - 1) * values[1], [stage, plain]).capped(stage)
    return [end, *[plain] * (parts - 1)] if place == 0 else [*[plain] * (parts - 1), end]


def with_recomputation(costs: Costs, weights: bool = False) -> Costs:
    """The costs where backwards make again what forwards did not keep, and no R runs: as of ``StageCosts``."""
    return replace(costs, stages=tuple(stage.with_recomputation(weights) for stage in costs.stages))


def evened(costs: Costs, placement: Placement, works: Sequence[object]) -> Costs:
    """The costs where ranks with equal work take equally long: as half of them do at most."""
    alike = [[row for row, other in zip(placement.stages, works, strict=True) if other == work] for work in works]
    made = list(costs.stages)
    for stages, rows in zip(placement.stages, alike, strict=True):
        for stage, same in zip(stages, zip(*rows, strict=True), strict=True):
            made[stage] = combined(median_low, [costs.stages[other] for other in same])
    return replace(costs, stages=tuple(made))


def shielded(costs: Costs, stages: Set[int]) -> Costs:
    """The costs where B of these stages has work behind its collectives: see ``StageCosts.shielded``."""
    if not stages:
        return costs
    return replace(costs, stages=tuple(one.shielded() if stage in stages else one for stage, one in enumerate(costs.stages)))


def trained(costs: Costs, shares: Iterable[tuple[float, float]]) -> Costs:
    """The costs where not all weights train.

    Args:
        shares: of B and of W that remain, for every stage. What no backward needs is not held, and what W alone needs, neither.
    """
    left = (
        replace(stage, retained=stage.retained * (weight > 0)).times(Load(backward=backward, weight=weight, memory=backward))
        for stage, (backward, weight) in zip(costs.stages, shares, strict=True)
    )
    return replace(costs, stages=tuple(left))


def without_fused(costs: Costs) -> Costs:
    """The costs where BW takes what B and W take."""
    return replace(costs, stages=tuple(replace(stage, fused=None) for stage in costs.stages))


def sliced(costs: Costs, splits: int) -> Costs:
    """The costs of one slice, where every microbatch is cut into ``splits`` equal ones."""
    if splits == 1:
        return costs
    loads = tuple(load for load in costs.loads for _ in range(splits))
    links = tuple(link._replace(seconds=link.seconds / splits) for link in costs.links)
    return replace(costs, stages=tuple(stage.sliced(splits) for stage in costs.stages), loads=loads, links=links)


def hidden(costs: Costs) -> Costs:
    """The costs if all that layers communicate took no time: no schedule, with any braids, is shorter than at these."""

    def without(stage: StageCosts) -> StageCosts:
        less = {name: sum(map(stage.value, parts)) for name, parts in ALL_TO_ALL.items()}
        seconds = {name: stage.value(name) - seconds for name, seconds in less.items()}
        fused = None if stage.fused is None else min(stage.fused, seconds["backward"] + stage.weight)
        changed: dict[str, Any] = {"fused": fused, **seconds, **dict.fromkeys(PARTS)}
        return replace(stage, **changed).bounded()

    return replace(costs, stages=tuple(map(without, costs.stages)))


def with_equal_copies(costs: Costs) -> Costs:
    """Costs with the default of copies: k is 1, and both directions take the same time."""
    work, moved = (sum(values) for values in zip(*((stage.total, stage.moved()) for stage in costs.stages), strict=True))
    seconds = work / moved / 2 if moved else 0.0
    return replace(costs, copies=replace(costs.copies, to_host=seconds, to_device=seconds))


def with_shards(costs: Costs, vocabulary: Vocabulary | None, ranks: int) -> Costs:
    """Costs with the vocabulary where it is: on all ranks, by default with equal shares; or else on the ends."""
    if vocabulary is None:
        return with_whole_vocabulary(costs, ranks)
    none = costs.vocabulary == VocabularyCosts()
    return replace(costs, vocabulary=EQUAL_SHARDS if none else costs.vocabulary.over(ranks))


def with_whole_vocabulary(costs: Costs, ranks: int) -> Costs:
    """Costs with the embedding on the first stage and the output layer on the last, in place of a shard on each of the ranks."""
    shards = costs.vocabulary.over(ranks)
    if not shards.total:
        return costs
    first, *inner, last = costs.stages if len(costs.stages) > 1 else (costs.stages[0], StageCosts(0, 0, 0, 0, 0))
    here, there = ranks * first.pace, ranks * last.pace
    first = replace(first, forward=first.forward + here * shards.IF, weight=first.weight + here * shards.IB, fused=None)
    kept = ranks * shards.activation
    last = replace(
        last,
        forward=last.forward + there * shards.S,
        # T makes the gradient by the weights; S made the one by the input, next to the logits.
        weight=last.weight + there * shards.T,
        activation=last.activation + kept,
        retained=last.retained + kept,
        fused=None,
    )
    return replace(costs, stages=(first, *inner, last), vocabulary=VocabularyCosts())


# What layers of experts do where costs do not say: the shares of F and of B in which they dispatch, compute experts, and combine,
# and the share of W that is of experts.
_DISPATCH, _EXPERTS, _COMBINE, _EXPERT_WEIGHTS = 0.1, 0.4, 0.1, 0.5


def with_parts(costs: Costs) -> Costs:
    """Costs with assumed parts of layers, where no stage has any: a fifth of F and of B is all-to-alls."""
    if any(stage.has_parts for stage in costs.stages):
        return costs
    shares = (_DISPATCH, _EXPERTS, _COMBINE)

    def parted(stage: StageCosts) -> StageCosts:
        forward, backward = ([share * stage.value(of) for share in shares] for of in ("forward", "backward"))
        values = dict(zip(PARTS, (*forward, *reversed(backward), _EXPERT_WEIGHTS * stage.weight), strict=True))
        return replace(stage, **values)  # type: ignore[arg-type]  # layers is not among them

    return replace(costs, stages=tuple(map(parted, costs.stages)))
