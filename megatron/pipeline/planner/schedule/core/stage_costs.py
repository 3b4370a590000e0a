"""Costs of the passes of one stage, of a rank's shard of the vocabulary, and of copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple

from megatron.pipeline.planner.schedule.core.braids import Parts
from megatron.pipeline.planner.schedule.core.loads import Load
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.slack import SLACK


class CostOf(StrEnum):
    """Owner of a cost that ``CostField`` names."""

    STAGE = "StageCosts, for every microbatch"
    BETWEEN = "StageCosts, once an iteration"
    ALL = "Costs"
    COPIES = "CopyCosts, of a rank's whole activations"


class CostField(NamedTuple):
    """A time, as flags and the JSON of a schedule name it: what reads, writes and explains costs is made from these.

    Attributes:
        flag: its name there.
        name: of the field that has it.
        meaning: for ``--help``; costs that it explains together have the same.
        default: where it is left out; None where it follows from others.
    """

    flag: str
    name: str
    meaning: str = ""
    of: CostOf = CostOf.STAGE
    default: float | None = None


_COPY = "the copies of its activations to host memory and back, by default half of F + B + W each"
_PART = "the shares of all-to-alls and experts in these, all or none"
_BESIDE = "how many times as long a braid computes while it communicates, by default 1"
_BOUNDARY = "reductions, steps and gathers of a rank between two iterations"
COST_FIELDS = (
    CostField("F", "forward"),
    CostField("B", "backward"),
    CostField("W", "weight"),
    CostField("comm", "hop", of=CostOf.ALL, default=0.0),
    CostField("BW", "fused", "the fused backward, by default B + W"),
    CostField("R", "recompute", "recomputation, by default F"),
    CostField("D2H", "to_host", _COPY, CostOf.COPIES),
    CostField("H2D", "to_device", _COPY, CostOf.COPIES),
    CostField("F.dispatch", "dispatch", _PART),
    CostField("F.experts", "experts", _PART),
    CostField("F.combine", "combine", _PART),
    CostField("B.combine", "backward_combine", _PART),
    CostField("B.experts", "backward_experts", _PART),
    CostField("B.dispatch", "backward_dispatch", _PART),
    CostField("W.experts", "weight_experts", _PART),
    CostField("layers", "layers", "how many layers have these parts, by default one"),
    CostField("beside_communication", "beside_communication", _BESIDE, CostOf.ALL, 1.0),
    CostField("RS", "reduce", _BOUNDARY, CostOf.BETWEEN),
    CostField("OPT", "step", _BOUNDARY, CostOf.BETWEEN),
    CostField("AG", "gather", _BOUNDARY, CostOf.BETWEEN),
    CostField("latency", "latency", "what each RS and AG of a bucket takes besides", CostOf.ALL, 0.0),
    CostField("norm", "norm", "the norm of all gradients", CostOf.ALL, 0.0),
)
BETWEEN = tuple(field.name for field in COST_FIELDS if field.of is CostOf.BETWEEN)
# The parts of a forward, of a backward and of W, whose rest is attention.
PARTS_OF = {
    whole: tuple(part.name for part in COST_FIELDS if part.flag.startswith(f"{flag}."))
    for flag, whole, *_ in COST_FIELDS
    if whole in ("forward", "backward", "weight")
}
PARTS = tuple(name for parts in PARTS_OF.values() for name in parts)
# What is part of what: no more together than the whole. What B and W save together is no more than either.
WITHIN = (
    ("activation", ("checkpoint",)),
    ("activation", ("movable",)),
    ("forward", PARTS_OF["forward"]),
    ("backward", PARTS_OF["backward"]),
    ("backward", ("saved",)),
    ("weight", ("weight_experts", "behind")),
    ("weight", ("saved",)),
)
# By field, which part of a load it grows with.
_LOAD_OF = {
    **{part: whole for whole, parts in PARTS_OF.items() for part in (whole, *parts)},
    **{"recompute": "forward", "behind": "weight", "fused": "fused", "saved": "saved"},
    **dict.fromkeys(("activation", "retained", "checkpoint", "movable"), "memory"),
}
ALL_TO_ALL = {"forward": ("dispatch", "combine"), "backward": ("backward_combine", "backward_dispatch")}


class MemoryUnit(StrEnum):
    """Unit in which costs count memory."""

    BYTES = "bytes"
    MICROBATCHES = "microbatches"


@dataclass(frozen=True)
class StageCosts:
    """The costs of one stage, for one microbatch, in any unit of time and any unit of memory.

    Attributes:
        forward, backward, weight: seconds of F, B and W; a fused BW takes ``backward + weight``.
        activation: what F allocates, held until B ends.
        retained: how much is held after B, until W ends: of that a part, or more where B makes activations again.
        fused: seconds of BW; None for ``backward + weight``.
        recompute: seconds of R, where a schedule has it.
        checkpoint: what F allocates where R follows; R allocates the rest of ``activation``.
        movable: how much of ``activation`` can be copied to host memory; None for all. Where R follows, all of ``checkpoint``.
        dispatch, experts, combine: seconds of the forward in which tokens go to experts, are computed there, and come back; None
            for a stage whose parts are not known. The rest is attention, and all else.
        backward_combine, backward_experts, backward_dispatch: the same of the backward, in its order.
        weight_experts: seconds of W for the experts' weights.
        behind, saved: seconds of the part of W that B can compute behind its collectives between tensor-parallel ranks (the
            weight gradients of row-parallel linears, and of the output layer), and how much shorter B and W are together then;
            None for 0.
        reduce, step, gather: seconds, once an iteration, of all buckets' RS, OPT and AG, without the latency of each; None for 0.
        layers: of the stage; None for 1. A braid takes those of its two halves in turn.
        slow: how many times as long as usual passes take on its rank, which all times here are of, and those of the vocabulary
            there take; None for 1.
    """

    forward: float
    backward: float
    weight: float
    activation: float = 1.0
    retained: float = 1.0
    fused: float | None = None
    recompute: float = 0.0
    checkpoint: float = 0.0
    movable: float | None = None
    dispatch: float | None = None
    experts: float | None = None
    combine: float | None = None
    backward_combine: float | None = None
    backward_experts: float | None = None
    backward_dispatch: float | None = None
    weight_experts: float | None = None
    layers: float | None = None
    behind: float | None = None
    saved: float | None = None
    reduce: float | None = None
    step: float | None = None
    gather: float | None = None
    slow: float | None = None

    def value(self, name: str) -> float:
        """A cost by name; where it is None, what follows from the others."""
        value = getattr(self, name)
        if value is None:
            following = {"fused": self.backward + self.weight, "movable": self.activation, "layers": 1.0}
            return following.get(name, 0.0)
        return value  # type: ignore[no-any-return]

    def seconds(self, kind: Kind) -> float:
        """Seconds of a pass of the stage."""
        return self.value(kind.row.seconds)

    def allocated(self, kind: Kind, recomputed: bool = False) -> float:
        """Activation memory that a pass allocates (positive) or frees (negative) by its end.

        Args:
            recomputed: whether the schedule has an R for the microbatch, so that F keeps no more than ``checkpoint``.
        """
        row = kind.row
        allocates, frees = row.allocates, row.frees
        if recomputed and row.recomputed:
            allocates, frees = allocates and row.recomputed, frees and row.recomputed
        return (self.value(allocates) if allocates else 0) - (self.value(frees) if frees else 0)

    def moved(self, recomputed: bool = False) -> float:
        """Memory that a copy to host memory takes away from the device, and the copy back brings."""
        return self.allocated(Kind.H2D, recomputed)

    @property
    def has_parts(self) -> bool:
        return any(getattr(self, name) is not None for name in PARTS)

    def parts(self, kind: Kind) -> Parts:
        """The parts of a pass: of F, or of a backward, with the weights' gradients if it computes them.

        A BW that is shorter than B and W, since it computes weights' gradients while it communicates, computes all of them. Only
        one that takes less than what both compute is known to compute less.
        """
        layers = max(1, round(self.value("layers")))
        if kind.is_forward:
            dispatch, experts, combine = map(self.value, PARTS[:3])
            return Parts(self.forward - dispatch - experts - combine, dispatch, experts, combine, layers=layers)
        combine, experts, dispatch = map(self.value, PARTS[3:6])
        attention = self.backward - dispatch - experts - combine
        if not kind.finishes_weights:
            return Parts(attention, dispatch, experts, combine, layers=layers)
        fused = self.value("fused")
        weights = max(0.0, fused - self.backward, min(self.weight, fused - attention - experts))
        of_experts = weights * self.value("weight_experts") / self.weight if self.weight else 0.0
        return Parts(attention, dispatch, experts, combine, weights - of_experts, of_experts, layers)

    def lanes(self, kind: Kind) -> tuple[float, float]:
        """Seconds in which a pass of the stage computes, and in which its layers communicate, whether or not at the same time."""
        if kind.is_forward or kind.sends_gradient:
            parts = self.parts(kind)
            return parts.computing, parts.communicating
        again = min(self.recompute, sum(map(self.value, ALL_TO_ALL["forward"]))) if kind is Kind.R else 0.0
        return self.seconds(kind) - again, again

    @property
    def total(self) -> float:
        """Seconds of one microbatch: F + B + W."""
        return self.forward + self.backward + self.weight

    def with_recomputation(self, weights: bool = False) -> StageCosts:
        """The costs where no R runs, and the backward itself makes again what F did not keep: what it makes it holds until W.

        Args:
            weights: whether B also does the work of W, which then takes and holds nothing.
        """
        fused = self.value("fused") + self.recompute
        held: dict[str, Any] = {"activation": self.checkpoint, "checkpoint": 0.0, "recompute": 0.0, "movable": None}
        if weights:
            return replace(self, backward=fused, weight=0.0, fused=None, retained=0.0, **held).bounded()
        return replace(self, backward=self.backward + self.recompute, fused=None if self.fused is None else fused, **held)

    def shielded(self) -> StageCosts:
        """The costs where B has weight gradients behind its collectives: see ``Schedule.shielded``."""
        behind, saved = self.value("behind"), self.value("saved")
        shorter = replace(self, backward=self.backward + behind - saved, weight=self.weight - behind, behind=None, saved=None)
        if self.sums:  # which are less exposed
            shorter = replace(shorter, backward_combine=max(0.0, self.value("backward_combine") - saved))
        return shorter.bounded()

    @property
    def sums(self) -> bool:
        """Tell whether all that its layers communicate are sums over tensor-parallel ranks: there are no experts in its parts."""
        return self.has_parts and not (self.experts or self.backward_experts or self.weight_experts)

    def bounded(self) -> StageCosts:
        """With parts that are no more together than their whole (``WITHIN``): of what takes nothing, nothing."""
        costs = self
        for whole, parts in WITHIN:
            most, together = costs.value(whole), sum(map(costs.value, parts))
            if together > most:
                less = {name: value * most / together for name in parts if (value := getattr(costs, name)) is not None}
                costs = replace(costs, **less)
        return costs

    @property
    def backward_allocates(self) -> float:
        """Memory that is held more after B than before it; 0 where B frees."""
        return max(0.0, self.retained - self.activation)

    def capped(self, like: StageCosts) -> StageCosts:
        """``bounded``, with no more held after B than F allocates unless the backwards of ``like`` make activations again."""
        kept = self.bounded()
        return kept if like.backward_allocates else replace(kept, retained=min(kept.retained, kept.activation))

    def times(self, load: Load) -> StageCosts:
        """The costs of a microbatch of another load: parts keep their shares of the pass whose parts they are."""
        backwards = self.backward + self.weight
        by = load._asdict() | {
            "fused": (load.backward * self.backward + load.weight * self.weight) / backwards if backwards else load.backward,
            "saved": min(load.backward, load.weight),
        }
        given = ((name, getattr(self, name), by[of]) for name, of in _LOAD_OF.items())
        return replace(self, **{name: value * times for name, value, times in given if value is not None})

    def slowed(self, times: float) -> StageCosts:
        """The costs on a device on which passes, their parts and steps take that many times as long."""
        longer = self.times(Load(times, times, times))
        return replace(longer, step=None if self.step is None else times * self.step, slow=times * self.pace)

    @property
    def pace(self) -> float:
        return self.slow or 1.0

    @property
    def has_boundary(self) -> bool:
        """Tell whether it is known what it does between two iterations."""
        return any(getattr(self, name) is not None for name in BETWEEN)

    @property
    def between(self) -> tuple[float, ...]:
        """Seconds of RS, OPT and AG, which it has once an iteration."""
        return tuple(self.value(name) for name in BETWEEN)

    def sliced(self, parts: int) -> StageCosts:
        """The costs of one slice of a microbatch, where each is cut into several: what runs once an iteration stays."""
        return replace(self.share(parts), **{name: getattr(self, name) for name in BETWEEN})

    def share(self, parts: int) -> StageCosts:
        """The costs of one of equal parts of a stage."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "slow"}
        return replace(self, **{name: value / parts for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class VocabularyCosts:
    """The costs of a rank's shard of the vocabulary, for one microbatch, where it is spread over all ranks.

    Attributes:
        S, T, IF, IB: seconds of the passes of these names.
        activation: what S allocates, held until T ends.
        exchange: seconds of a collective between all ranks; None for those of a hop.
        ranks: over how many it is spread in these costs; None for those of any plan.
    """

    S: float = 0.0
    T: float = 0.0
    IF: float = 0.0
    IB: float = 0.0
    activation: float = 0.0
    exchange: float | None = None
    ranks: float | None = None

    def over(self, ranks: int) -> VocabularyCosts:
        """The costs of a share of all, where that many ranks have one each."""
        times = (self.ranks or ranks) / ranks
        shares = {name: times * getattr(self, name) for name in ("S", "T", "IF", "IB", "activation")}
        return replace(self, **shares, ranks=None)

    def times(self, load: Load) -> VocabularyCosts:
        """The costs of a microbatch of another load."""
        return replace(self, **{name: load.tokens * value for name, value in asdict(self).items() if value and name != "ranks"})

    def seconds(self, kind: Kind) -> float:
        """Seconds of a pass of the vocabulary."""
        return float(getattr(self, kind.row.seconds))

    def allocated(self, kind: Kind) -> float:
        """Activation memory that a pass allocates (positive) or frees (negative) by its end."""
        return self.activation * ((kind.row.allocates is not None) - (kind.row.frees is not None))

    @property
    def total(self) -> float:
        """Seconds of one microbatch."""
        return self.S + self.T + self.IF + self.IB


@dataclass(frozen=True)
class CopyCosts:
    """Costs of copies between a rank's device and host memory.

    Attributes:
        to_host, to_device: seconds for one unit of memory while no other copy runs.
        both: the share of its speed that a direction keeps while the other one of the same rank is busy.
        switch: how many neighbouring ranks share one switch between devices and host memory.
        shared: the share of its speed that each of them keeps while all copy in the same direction.

    Raises:
        ValueError: a number is out of range.
    """

    to_host: float = 0.0
    to_device: float = 0.0
    both: float = 1.0
    switch: int = 1
    shared: float = 1.0

    def __post_init__(self) -> None:
        for name in ("to_host", "to_device"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} of the copies must be a number of at least 0, got {getattr(self, name)}")
        if type(self.switch) is not int or self.switch < 1:
            raise ValueError(f"switch of the copies is a number of ranks, at least 1, got {self.switch!r}")
        for name, least in (("both", 0.5), ("shared", 1 / self.switch)):
            if not least * (1 - SLACK) <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} of the copies is a share of a direction's speed, {least:g} (they take turns) to 1 (they do not "
                    f"disturb each other), got {getattr(self, name)}"
                )

    @property
    def slowest(self) -> float:
        """The share of its speed that a copy keeps while all other copies run."""
        return self.both * (self.shared if self.switch > 1 else 1.0)

    @property
    def disturb_each_other(self) -> bool:
        return self.slowest < 1


def combined(combine: Callable[[Sequence[float]], float], stages: Sequence[StageCosts]) -> StageCosts:
    """A stage whose every cost is made from those of several; what is left to follow in all of them is left to follow."""
    costs: dict[str, Any] = {}
    for field in fields(StageCosts):
        given = any(getattr(stage, field.name) is not None for stage in stages)
        costs[field.name] = combine([stage.value(field.name) for stage in stages]) if given else None
    return StageCosts(**costs | {"slow": stages[0].slow if len({stage.slow for stage in stages}) == 1 else None})


def by_name(costs: StageCosts | VocabularyCosts) -> dict[str, Any]:
    """Costs by name, without those that are left to follow from others."""
    return {name: value for name, value in asdict(costs).items() if value is not None}
