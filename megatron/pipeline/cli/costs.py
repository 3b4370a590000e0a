"""What the flags say about costs, for a placement; and how costs are told in the JSON of a schedule."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from megatron.pipeline.cli.arguments import COPIES, EXTRA, MEMORY, SHARED, SPREAD, TIMES, Numbers, checked
from megatron.pipeline.schedule.core.costs import (
    EQUAL_SHARDS,
    CopyCosts,
    Costs,
    StageCosts,
    VocabularyCosts,
    by_name,
    uniform,
    with_equal_copies,
)
from megatron.pipeline.schedule.core.passes import Vocabulary
from megatron.pipeline.schedule.core.placement import Placement

_FIELDS = {"F": "forward", "B": "backward", "W": "weight", "BW": "fused", "R": "recompute"}


def costs_of(
    options: argparse.Namespace, placement: Placement, told: Mapping[str, Any] | None = None, copies: bool = False
) -> Costs:
    """The costs of every stage of a placement: from the flags, and what they leave open from a file or by default.

    One rank's share is spread evenly over its chunks. Memory is counted in microbatches: what F allocates on a whole rank
    is 1. The extras of the first and the last stage come on top, and ``--costs`` is meant, for every replica of the model.

    Args:
        options: of ``cost_flags``.
        told: the fields ``costs``, ``activation``, ``vocab_costs``, ``copies`` and ``stage_costs`` of a schedule's JSON, each of
            which may be missing.
        copies: whether activations go to host memory: where nobody says what that takes, k is 1, so that either direction takes
            half of F + B + W.

    Raises:
        ValueError: numbers are out of range, for another number of stages, or ``--costs`` comes with flags that it replaces.
    """
    told = told or {}
    if options.costs:
        costs = _file_only(options)
        _check_count(costs, placement, placement.depth)
        costs = replace(costs, stages=costs.stages * placement.replicas)
    elif told.get("stage_costs") is not None:
        costs = Costs.from_fields(told["stage_costs"])
        _check_count(costs, placement, placement.last_stage + 1)
        costs = _set(costs, placement, options.cost or {}, options.activation)
    else:
        cost = checked(told.get("costs", {}), TIMES) | (options.cost or {})
        activation = options.activation or checked(told.get("activation", {}), MEMORY)
        cost.setdefault("R", cost.get("F", 1.0))
        costs = _set(uniform(placement), placement, cost, activation)
    shared = checked(told.get("copies", {}), SHARED) | (options.copy or {})
    if shared:
        costs = replace(costs, copies=_shared(costs.copies, shared))
    told_costs = told.get("costs")
    named = {*(told_costs if isinstance(told_costs, dict) else ()), *(options.cost or ())}
    if copies and named.isdisjoint(COPIES) and costs.copies.to_host == costs.copies.to_device == 0:
        costs = with_equal_copies(costs)
    spread = checked(told.get("vocab_costs", {}), SPREAD) | (options.vocab_cost or {})
    if spread:
        costs = replace(costs, vocabulary=VocabularyCosts(**({"S": EQUAL_SHARDS.S, "T": EQUAL_SHARDS.T} | spread)))
    return _with_extras(costs, placement, options.first_stage or {}, options.last_stage or {})


def with_shards(costs: Costs, vocabulary: Vocabulary | None) -> Costs:
    """Costs with those of the vocabulary, if it is spread and nobody said what it costs."""
    return replace(costs, vocabulary=EQUAL_SHARDS) if vocabulary and costs.vocabulary == VocabularyCosts() else costs


def share_of(costs: Costs, placement: Placement, value: Callable[[StageCosts], float]) -> float:
    """One rank's share, on average, of what is said of every stage."""
    values = list(map(value, costs.stages))
    mean = values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)
    return mean * placement.chunks_per_replica


def cost_fields(placement: Placement, costs: Costs, vocabulary: bool = False, copies: bool = False) -> dict[str, Any]:
    """What ``costs_of`` reads back: one rank's share on average, and every stage where that does not say it all.

    Args:
        vocabulary: whether it is spread, so that its costs matter.
        copies: whether activations are copied to host memory.
    """
    stages = costs.stages

    def share(field: str) -> float:
        return share_of(costs, placement, attrgetter(field))

    told = {name: share(_FIELDS[name]) for name in ("F", "B", "W")} | {"comm": costs.hop}
    held = {"B": share("activation"), "W": share("retained")}
    if all(stage.fused is not None for stage in stages):
        told["BW"] = share("fused")
    if any(stage.recompute != stage.forward for stage in stages):
        told["R"] = share("recompute")
    if any(stage.checkpoint for stage in stages):
        held["R"] = share("checkpoint")
    told_all: dict[str, Any] = {"costs": told, "activation": held}
    if vocabulary:
        told_all["vocab_costs"] = by_name(costs.vocabulary)
    if copies:
        moved = share_of(costs, placement, StageCosts.moved)
        told |= {"D2H": costs.copies.to_host * moved, "H2D": costs.copies.to_device * moved}
        told_all["copies"] = {name: getattr(costs.copies, name) for name in SHARED}
    if len(set(stages)) == 1 and math.isclose(held["B"], 1.0) and stages[0].movable is None:
        return told_all
    return told_all | {"stage_costs": replace(costs, vocabulary=VocabularyCosts()).fields()}


def _file_only(options: argparse.Namespace) -> Costs:
    for flag in ("cost", "activation", "first_stage", "last_stage"):
        if getattr(options, flag):
            raise ValueError(f"--costs says what every stage costs: leave --{flag.replace('_', '-')} out, or --costs")
    return options.costs


def _check_count(costs: Costs, placement: Placement, stages: int) -> None:
    if len(costs.stages) != stages:
        raise ValueError(
            f"costs of {len(costs.stages)} stages; this schedule has {stages} ({placement.ranks} ranks with "
            f"{placement.chunks} chunk(s) each)"
        )


def _set(costs: Costs, placement: Placement, cost: Numbers, activation: Numbers | None) -> Costs:
    """The same costs on every stage for what is named, each chunk with its part of a rank's share."""
    parts = placement.chunks_per_replica
    named = {_FIELDS[name]: value / parts for name, value in cost.items() if name in _FIELDS}
    if activation:
        held = activation.get("B", 1.0)
        retained, kept = activation.get("W", held), activation.get("R", 0.0)
        if not held > 0 or max(retained, kept) > held:
            given = f"B={held:g},W={retained:g}" + (f",R={kept:g}" if kept else "")
            raise ValueError(f"activation {given}: F must allocate more than 0 (B), of which W remains after B and R before it")
        named |= {"activation": 1 / parts, "retained": retained / held / parts, "checkpoint": kept / held / parts}
    costs = replace(costs, stages=tuple(replace(stage, **named) for stage in costs.stages), hop=cost.get("comm", costs.hop))
    if not any(name in cost for name in COPIES):
        return costs
    # One direction that is not named takes as long as the other.
    to_host, to_device = (cost[name] if name in cost else cost[other] for name, other in (COPIES, COPIES[::-1]))
    moved = share_of(costs, placement, StageCosts.moved) or 1.0
    return replace(costs, copies=replace(costs.copies, to_host=to_host / moved, to_device=to_device / moved))


def _shared(copies: CopyCosts, given: Numbers) -> CopyCosts:
    """Copies that disturb each other as is given.

    Raises:
        ValueError: a number is out of range, or ranks share a switch that is of one rank only.
    """
    switch = given.get("switch", copies.switch)
    if switch != int(switch):
        raise ValueError(f"switch={switch:g}: expected a number of neighbouring ranks that share one switch, such as 2")
    if switch == 1 and given.get("shared", 1) < 1:
        raise ValueError(f"shared={given['shared']:g} is of ranks behind one switch: say how many share one, as in switch=2")
    both, shared = given.get("both", copies.both), given.get("shared", copies.shared)
    return replace(copies, both=both, switch=int(switch), shared=shared)


def _with_extras(costs: Costs, placement: Placement, first: Numbers, last: Numbers) -> Costs:
    if not first and not last:
        return costs
    stages = list(costs.stages)
    for index in range(len(stages)):
        for extra, there in ((first, placement.is_first(index)), (last, placement.is_last(index))):
            if there:
                stages[index] = _add(stages[index], extra)
    return replace(costs, stages=tuple(stages))


def _add(stage: StageCosts, extra: Numbers) -> StageCosts:
    """A stage with more to do; its additional activations are held as long as the others are, in the same proportion."""
    forward, backward, weight, more = (extra.get(name, 0.0) for name in EXTRA)
    activation = stage.activation + more

    def grown(part: float) -> float:
        return min(activation, part + more * (part / stage.activation if stage.activation else 1.0))

    return StageCosts(
        stage.forward + forward,
        stage.backward + backward,
        stage.weight + weight,
        activation,
        grown(stage.retained),
        None if stage.fused is None else stage.fused + backward + weight,
        stage.recompute + forward,
        grown(stage.checkpoint),
    )
