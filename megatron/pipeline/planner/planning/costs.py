"""Costs of passes from the flags of ``mpipe`` and from the JSON of a schedule, and the fields of that JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

from megatron.pipeline.planner.schedule.core import cutting, link_costs
from megatron.pipeline.planner.schedule.core.costs import (
    EQUAL_SHARDS,
    CopyCosts,
    Costs,
    StageCosts,
    VocabularyCosts,
    by_name,
    uniform,
)
from megatron.pipeline.planner.schedule.core.costs_fields import COST_RANGE, MOST_LAYERS, is_cost, is_layers
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.core.stage_costs import COST_FIELDS, PARTS, CostField, CostOf
from megatron.pipeline.planner.shape.trained import Trained

Numbers: TypeAlias = dict[str, float]

TIMES = (*(field.flag for field in COST_FIELDS), "AR")
_ROWS = 5 / 12  # of W: the row-parallel linears of a transformer layer with an MLP four times as wide
COPIES = tuple(field.flag for field in COST_FIELDS if field.of is CostOf.COPIES)
_PARTS = tuple(flag for flag in TIMES if "." in flag)
_OF_STAGES = (CostOf.STAGE, CostOf.BETWEEN)
MEMORY = ("B", "W", "R")
EXTRA = ("F", "B", "W", "activation")
SPREAD = tuple(field.name for field in fields(VocabularyCosts) if field.name != "ranks")
_SLOWEST = 0.01, 1000.0  # how many times as long a rank may take
read_trained = Trained.read  # for flags
SHARED = tuple(field.name for field in fields(CopyCosts) if field.name not in ("to_host", "to_device"))


@dataclass(frozen=True)
class CostFlags:
    """The cost flags of ``mpipe``. None: the file has the value, or else the default counts.

    Attributes:
        cost, activation, vocab_cost: one rank's share of one microbatch, by ``TIMES``, ``MEMORY`` and ``SPREAD``.
        copy: how copies disturb each other, by ``SHARED``.
        first_stage, last_stage: what is added to the first and the last stage, by ``EXTRA``.
        costs: of every stage, in place of ``cost`` but for single links, ``activation``, ``first_stage`` and ``last_stage``.
        boundary: what a rank does between two iterations, ``RS`` and ``AG``, also on top of ``costs``.
        slow: by rank, how many times as long as usual its passes take, on top of all others.
        trained: what trains, of costs of a training of all; None where all does.
    """

    cost: Numbers | None = None
    activation: Numbers | None = None
    first_stage: Numbers | None = None
    last_stage: Numbers | None = None
    vocab_cost: Numbers | None = None
    copy: Numbers | None = None
    costs: Costs | None = None
    boundary: Numbers | None = None
    slow: Mapping[int, float] | None = None
    trained: Trained | None = None


def named_times() -> str:
    """Names of ``--cost`` that may be left out, with what each is."""
    named = ((meaning, [field.flag for field in alike]) for meaning, alike in groupby(COST_FIELDS, lambda field: field.meaning))
    return "; ".join(f"{', '.join(flags)} ({meaning})" for meaning, flags in named if meaning)


def checked(given: object, names: tuple[str, ...]) -> Numbers:
    """Numbers by name, from the command line or a file.

    Raises:
        ValueError: not a table of numbers, an unknown name, or a number out of range.
    """
    allowed = f"allowed are {', '.join(names)}, each {COST_RANGE}"
    if not isinstance(given, dict):
        raise ValueError(f"expected costs by name, got {given!r}; {allowed}")
    for name, value in given.items():
        if "comm" in names and (link := _link(name)):
            link_costs.read(link, 0.0)
        elif name not in names:
            whole, _, part = name.partition(".") if isinstance(name, str) else (name, "", "")
            rest = f" (attention is what the other parts leave of {whole}: give {whole})" if part == "attention" else ""
            raise ValueError(f"unknown cost {name!r}{rest}; {allowed}")
        if not is_cost(value):
            raise ValueError(f"{name}={value!r}: expected a number that is not negative, {COST_RANGE}")
    return {name: float(value) for name, value in given.items()}


def _link(name: object, of: tuple[str, ...] = ("comm[", "busy[")) -> str:
    """The link that a cost is of, such as 2-3 for ``comm[2-3]``; empty where it is of none."""
    return name[5:-1] if isinstance(name, str) and name.startswith(of) and name.endswith("]") else ""


def with_links(costs: Costs, cost: Numbers, ranks: int) -> Costs:
    """The costs with those of single links in ``--cost``: the latency ``comm[..]``, and the seconds ``busy[..]``.

    Raises:
        ValueError: there is no such link among these ranks, or one is given twice.
    """
    comm, busy = ({link: cost[name] for name in cost if (link := _link(name, (of,)))} for of in ("comm[", "busy["))
    links = link_costs.read_all((link, comm.get(link, 0.0), busy.get(link, 0.0)) for link in comm | busy)
    links = link_costs.joined(costs.links, links)
    link_costs.check(links, ranks)
    return replace(costs, links=links)


def costs_of(flags: CostFlags, placement: Placement, file: Mapping[str, Any] | None = None, copies: bool = False) -> Costs:
    """The costs of every stage of a placement: from the flags, then from a schedule's file, then by default.

    One rank's share is spread evenly over its chunks. Memory is counted in microbatches: what F allocates on a whole rank
    is 1. The extras of the first and the last stage come on top. Where ``--costs`` is of another number of stages it is cut
    again: see ``Costs.of_depth``.

    Args:
        file: the fields ``costs``, ``activation``, ``vocab_costs``, ``copies`` and ``stage_costs`` of a schedule's JSON, each of
            which may be missing.
        copies: whether activations go to host memory: where neither flags nor file give the time of copies, k is 1, so that
            either direction takes half of F + B + W.

    Raises:
        ValueError: numbers are out of range, the schedule's file has the costs of other stages than its own, or ``--costs``
            comes with flags that it replaces, or F, B and W of every stage take 0.
    """
    file = file or {}
    if flags.costs:
        for flag in ("cost", "activation", "first_stage", "last_stage"):
            if getattr(flags, flag) and not (flag == "cost" and all(map(_link, flags.cost or ()))):
                rest = ", but for comm[..] of single links" if flag == "cost" else ""
                raise ValueError(f"--costs says what every stage costs: leave --{flag.replace('_', '-')} out{rest}, or --costs")
        costs = _set(cutting.of_depth(flags.costs, placement.depth), placement, flags.cost or {}, None)
    elif file.get("stage_costs") is not None:
        if "AR" in (flags.cost or {}):
            raise ValueError(
                "AR says what F, B and BW consist of, and this file has the costs of every stage: plan again with it"
            )
        costs = Costs.from_fields(file["stage_costs"])
        costs.check_placement(placement)
        costs = _set(costs, placement, flags.cost or {}, flags.activation)
    else:
        cost = checked(file.get("costs", {}), TIMES) | (flags.cost or {})
        activation = flags.activation or checked(file.get("activation", {}), MEMORY)
        cost.setdefault("R", cost.get("F", 1.0))
        sums = cost.pop("AR", 0.0)
        cost = _with_sums(cost, sums) if sums else cost
        _check_parts(cost)
        costs = _set(uniform(placement), placement, cost, activation)
        if sums:
            behind = _ROWS * costs.stages[0].weight
            shields = {"behind": behind, "saved": min(behind, sums / placement.chunks, costs.stages[0].backward)}
            costs = replace(costs, stages=tuple(replace(stage, **shields) for stage in costs.stages))
    shared = checked(file.get("copies", {}), SHARED) | (flags.copy or {})
    if shared:
        costs = replace(costs, copies=_shared(costs.copies, shared))
    in_file = file.get("costs")
    named = {*(in_file if isinstance(in_file, dict) else ()), *(flags.cost or ())}
    if copies and named.isdisjoint(COPIES) and costs.copies.to_host == costs.copies.to_device == 0:
        costs = cutting.with_equal_copies(costs)
    spread = checked(file.get("vocab_costs", {}), SPREAD) | (flags.vocab_cost or {})
    if spread:
        costs = replace(costs, vocabulary=VocabularyCosts(**({"S": EQUAL_SHARDS.S, "T": EQUAL_SHARDS.T} | spread)))
    if flags.boundary:
        costs = _set(costs, placement, flags.boundary, None)
    costs = _with_extras(costs, placement, flags.first_stage or {}, flags.last_stage or {})
    costs = cutting.trained(costs, flags.trained.stages(placement.depth)) if flags.trained else costs
    slow = slow_stages(placement, flags.slow or {})
    stages = tuple(each.slowed(slow[stage] / each.pace) if stage in slow else each for stage, each in enumerate(costs.stages))
    return taking_time(replace(costs, stages=stages))


def _with_sums(cost: Numbers, sums: float) -> Numbers:
    """Costs of a rank of which some seconds of F, and as many of B, are sums over tensor-parallel ranks.

    They are the only parts that communicate. A BW hides those of B behind the weight gradients of column-parallel linears, unless
    costs say what it takes.

    Raises:
        ValueError: parts of the layers are given, too, or sums take longer than F or B.
    """
    if given := [part for part in _PARTS if part in cost]:
        raise ValueError(f"AR and {', '.join(given)} both say what layers communicate: leave one of them out")
    backward, weight = cost.get("B", 1.0), cost.get("W", 1.0)
    if sums > (least := min(cost.get("F", 1.0), backward)):
        raise ValueError(f"AR = {sums:g} is more than {least:g}, the shorter of F and B, whose part it is")
    parts = dict.fromkeys(_PARTS, 0.0) | {"F.combine": sums, "B.combine": sums}
    return {"BW": backward + weight - min(sums, (1 - _ROWS) * weight)} | cost | parts


def slow_stages(placement: Placement, slow: Mapping[int, float]) -> dict[int, float]:
    """Factors of stages from those of their ranks: how many times as long each takes, where that is said.

    Raises:
        ValueError: there is no such rank.
    """
    for rank, times in slow.items():
        if rank >= placement.ranks:
            raise ValueError(f"--slow {rank}={times:g}: there is no rank {rank}; the ranks are 0 to {placement.ranks - 1}")
    return {stage: times for rank, times in slow.items() for stage in placement.stages[rank]}


def read_slow(text: str) -> dict[int, float]:
    """Factors by rank from ``2=1.3,5=1.1``.

    Raises:
        ValueError: it says something else, or a rank twice.
    """
    found: dict[int, float] = {}
    for item in text.split(","):
        rank, _, times = (part.strip() for part in item.partition("="))
        try:
            number, factor = int(rank), float(times)
        except ValueError:
            number, factor = -1, 0.0
        if number < 0 or number in found or not _SLOWEST[0] <= factor <= _SLOWEST[1]:
            raise ValueError(
                f"{text!r}: expected each rank at most once, with how many times as long its passes take, from {_SLOWEST[0]:g} "
                f"to {_SLOWEST[1]:g}, as in 2=1.3 or 2=1.3,5=1.1"
            )
        found[number] = factor
    return found


def taking_time(costs: Costs) -> Costs:
    """The costs, if a pass of a stage takes time.

    Raises:
        ValueError: all of them take 0.
    """
    if any(stage.forward or stage.backward or stage.weight for stage in costs.stages):
        return costs
    raise ValueError("F, B and W of every stage take 0, and every order is as short: give one of them a time above 0")


def share_of(costs: Costs, placement: Placement, value: Callable[[StageCosts], float]) -> float:
    """One rank's share, on average, of a value of every stage."""
    values = list(map(value, costs.stages))
    mean = values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)
    return mean * placement.chunks


def cost_fields(placement: Placement, costs: Costs, vocabulary: bool = False, copies: bool = False) -> dict[str, Any]:
    """Fields that ``costs_of`` reads back: one rank's share on average, and every stage where these do not suffice.

    Args:
        vocabulary: whether it is spread, so that its costs matter.
        copies: whether activations are copied to host memory.
    """
    stages = costs.stages

    def share(name: str) -> float:
        return share_of(costs, placement, partial(StageCosts.value, name=name))

    times = {
        field.flag: share(field.name) if field.of in _OF_STAGES else getattr(costs, field.name)
        for field in COST_FIELDS
        if _is_written(field, costs)
    }
    for name, (busy, latency) in link_costs.written(costs.links).items():
        times |= {f"comm[{name}]": latency} | ({f"busy[{name}]": busy} if busy else {})
    held = {"B": share("activation"), "W": share("retained")}
    if any(stage.checkpoint for stage in stages):
        held["R"] = share("checkpoint")
    found: dict[str, Any] = {"costs": times, "activation": held}
    if vocabulary:
        found["vocab_costs"] = by_name(costs.vocabulary)
    if copies:
        moved = share_of(costs, placement, StageCosts.moved)
        times |= {"D2H": costs.copies.to_host * moved, "H2D": costs.copies.to_device * moved}
        found["copies"] = {name: getattr(costs.copies, name) for name in SHARED}
    plain = len(set(stages)) == 1 and stages[0].movable is stages[0].behind is stages[0].slow is None
    if plain and math.isclose(held["B"], 1.0) and not costs.loads:
        return found
    return found | {"stage_costs": replace(costs, vocabulary=VocabularyCosts()).fields()}


def _is_written(field: CostField, costs: Costs) -> bool:
    """Tell whether one rank's share of a cost is in the JSON: it does not follow from others, or is no default."""
    if field.of not in _OF_STAGES:
        return field.of is CostOf.ALL and (field.flag == "comm" or getattr(costs, field.name) != field.default)
    if field.of is CostOf.BETWEEN:
        return costs.has_boundary
    if field.name == "recompute":
        return any(stage.recompute != stage.forward for stage in costs.stages)
    if field.name in (*PARTS, "layers"):
        return all(stage.has_parts for stage in costs.stages)
    return all(getattr(stage, field.name) is not None for stage in costs.stages)


def _check_parts(cost: Numbers) -> None:
    """Raises:
    ValueError: the parts of a pass take longer than the pass, in the numbers that were given, of a rank, not of a stage; or some
        are left out, which would take nothing.
    """
    for name in ("F", "B", "W"):
        parts = [part for part in cost if part.startswith(f"{name}.")]
        together, whole = math.fsum(cost[part] for part in parts), cost.get(name, 1.0)
        if together > whole * (1 + SLACK):
            whose = "whose parts they are" if len(parts) > 1 else "whose part it is"
            raise ValueError(f"{' + '.join(parts)} = {together:g} is more than {name} = {whole:g}, {whose}")
    layers = cost.get("layers", 1)
    if not is_layers(layers):
        raise ValueError(f"layers={layers:g}: give a whole number of layers per rank, from 1 to {MOST_LAYERS}")
    given, missing = ([name for name in _PARTS if (name in cost) is has] for has in (True, False))
    if given and missing:
        raise ValueError(
            f"{', '.join(given)} without {', '.join(missing)}: give all parts of the layers (0 for what there is none of), or "
            "none (then --overlap-experts assumes them)"
        )


def _set(costs: Costs, placement: Placement, cost: Numbers, activation: Numbers | None) -> Costs:
    """The same costs on every stage for what is named, each chunk with its part of a rank's share."""
    parts = placement.chunks
    rows = [field for field in COST_FIELDS if field.flag in cost]
    named = {field.name: cost[field.flag] / parts for field in rows if field.of in _OF_STAGES}
    if activation:
        held = activation.get("B", 1.0)
        retained, kept = activation.get("W", held), activation.get("R", 0.0)
        if not held > 0 or kept > held:
            given = f"B={held:g},W={retained:g}" + (f",R={kept:g}" if kept else "")
            raise ValueError(f"activation {given}: F must allocate more than 0 (B), of which R remains before R")
        named |= {"activation": 1 / parts, "retained": retained / held / parts, "checkpoint": kept / held / parts}
    shared: dict[str, Any] = {field.name: cost[field.flag] for field in rows if field.of is CostOf.ALL}
    costs = with_links(costs, cost, placement.ranks)
    costs = replace(costs, stages=tuple(replace(stage, **named) for stage in costs.stages), **shared)
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

    return replace(
        stage,
        forward=stage.forward + forward,
        backward=stage.backward + backward,
        weight=stage.weight + weight,
        activation=activation,
        retained=grown(stage.retained),
        fused=None if stage.fused is None else stage.fused + backward + weight,
        recompute=stage.recompute + forward,
        checkpoint=grown(stage.checkpoint),
    )
