"""What passes cost: seconds and bytes of every pass on every stage, and of every hop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from math import lcm
from typing import Any

from megatron.pipeline.schedule.core.braids import Parts, braid_seconds
from megatron.pipeline.schedule.core.kinds import COPY_LANES, Lane
from megatron.pipeline.schedule.core.passes import Kind
from megatron.pipeline.schedule.core.placement import Placement

__all__ = ["CopyCosts", "Costs", "StageCosts", "VocabularyCosts", "uniform"]

# The parts of a forward, of a backward and of W, whose rest is attention.
PARTS = ("dispatch", "experts", "combine", "backward_combine", "backward_experts", "backward_dispatch", "weight_experts")
_ALL_TO_ALL = {"forward": ("dispatch", "combine"), "backward": ("backward_combine", "backward_dispatch")}
# The range keeps sums and ratios of costs, over any number of passes, within what a float can hold.
COST_RANGE = "0 or between 1e-100 and 1e100"


@dataclass(frozen=True)
class StageCosts:
    """The costs of one stage, for one microbatch, in any unit of time and any unit of memory.

    Attributes:
        forward, backward, weight: seconds of F, B and W; a fused BW takes ``backward + weight``.
        activation: what F allocates, held until B ends.
        retained: how much of that is still held after B, until W ends.
        fused: seconds of BW; None for ``backward + weight``.
        recompute: seconds of R, where a schedule has it.
        checkpoint: what F allocates where R follows; R allocates the rest of ``activation``.
        movable: how much of ``activation`` can be copied to host memory; None for all. Where R follows, all of ``checkpoint``.
        dispatch, experts, combine: seconds of the forward in which tokens go to experts, are computed there, and come back; None
            for a stage whose parts are not known. The rest is attention, and all else.
        backward_combine, backward_experts, backward_dispatch: the same of the backward, in its order.
        weight_experts: seconds of W for the experts' weights.
        layers: of the stage; None for 1. A braid takes those of its two halves in turn.
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
        """How much a copy to host memory takes away from the device, and the copy back brings."""
        return self.allocated(Kind.H2D, recomputed)

    @property
    def has_parts(self) -> bool:
        """Whether the parts of its layers are known."""
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
        again = min(self.recompute, sum(map(self.value, _ALL_TO_ALL["forward"]))) if kind is Kind.R else 0.0
        return self.seconds(kind) - again, again

    @property
    def total(self) -> float:
        """Seconds of one microbatch: F + B + W."""
        return self.forward + self.backward + self.weight

    def share(self, parts: int) -> StageCosts:
        """The costs of one of ``parts`` equal parts."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value / parts for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class VocabularyCosts:
    """The costs of a rank's shard of the vocabulary, for one microbatch, where it is spread over all ranks.

    Attributes:
        S, T, IF, IB: seconds of the passes of these names.
        activation: what S allocates, held until T ends.
        exchange: seconds of a collective between all ranks; None for those of a hop.
    """

    S: float = 0.0
    T: float = 0.0
    IF: float = 0.0
    IB: float = 0.0
    activation: float = 0.0
    exchange: float | None = None

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
    """What copies between a rank's device and host memory cost.

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
            if not least * (1 - 1e-9) <= getattr(self, name) <= 1:
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


@dataclass(frozen=True)
class Costs:
    """The costs of every stage, the seconds of one hop between neighbouring ranks, what a spread vocabulary costs, and copies to
    host memory.

    Raises:
        ValueError: a time or size is negative or not finite, or more is retained after B, kept for R, or moved, than F allocates.
    """

    stages: tuple[StageCosts, ...]
    hop: float = 0.0
    vocabulary: VocabularyCosts = VocabularyCosts()
    copies: CopyCosts = CopyCosts()

    def __post_init__(self) -> None:
        if not 0 <= self.hop < float("inf"):
            raise ValueError(f"the hop must take 0 seconds or more, got {self.hop}")
        named: list[tuple[str, StageCosts | VocabularyCosts]] = [("the vocabulary", self.vocabulary)]
        named += [(f"stage {index}", stage) for index, stage in enumerate(self.stages)]
        for of, costs in named:
            for field in fields(costs):
                value = getattr(costs, field.name)
                if not (value is None and field.default is None) and not 0 <= value < float("inf"):
                    raise ValueError(f"{field.name} of {of} must be a number of at least 0, got {value}")
        for index, stage in enumerate(self.stages):
            most = stage.activation
            for name, amount, use in (
                ("retained", stage.retained, f"retain {stage.retained} after B of the {most} that F allocated"),
                ("checkpoint", stage.checkpoint, f"keep {stage.checkpoint} for R, more than the {most} without R"),
                ("movable", stage.movable, f"move {stage.movable} of the {most} that F allocated"),
            ):
                if amount is not None and amount > most:
                    raise ValueError(f"stage {index} would {use}; {name} must not be more")
            for whole, names in (("forward", PARTS[:3]), ("backward", PARTS[3:6]), ("weight", PARTS[6:])):
                together = sum(map(stage.value, names))
                if together > stage.value(whole) * (1 + 1e-9):
                    raise ValueError(
                        f"stage {index}: {', '.join(names)} take {together:g}, more than the {stage.value(whole):g} of {whole}, "
                        "whose parts they are"
                    )

    def check_placement(self, placement: Placement) -> None:
        """Raises:
        ValueError: the costs are for another number of stages than the placement has.
        """
        stages = placement.last_stage + 1
        if len(self.stages) != stages:
            raise ValueError(
                f"costs of {len(self.stages)} stages for a placement of {stages} ({placement.ranks} ranks with "
                f"{placement.chunks} chunks each); give one StageCosts per stage"
            )

    def of_depth(self, stages: int) -> Costs:
        """The costs of the same model cut into another number of stages: those here are cut evenly, and joined in their order.

        What the first and the last stage cost more than the stages between them (the embedding, the output layer) stays at the
        ends.
        """
        if stages == len(self.stages):
            return self
        common = lcm(stages, len(self.stages))
        parts, joined = common // len(self.stages), common // stages
        pieces = [piece for place in range(len(self.stages)) for piece in self._parts(place, parts)]
        return replace(self, stages=tuple(_sum(pieces[start : start + joined]) for start in range(0, common, joined)))

    def _parts(self, place: int, parts: int) -> list[StageCosts]:
        """A stage in equal parts; what an end of the model costs more than its neighbour is in the part at that end."""
        stage, last = self.stages[place], len(self.stages) - 1
        if parts == 1 or place not in (0, last) or last < 2:
            return [stage.share(parts)] * parts
        plain = combined(min, [stage, self.stages[1 if place == 0 else last - 1]]).share(parts)
        end = combined(lambda values: values[0] - (parts - 1) * values[1], [stage, plain])
        end = replace(end, **{name: min(end.value(name), end.activation) for name in ("retained", "checkpoint")})
        return [end, *[plain] * (parts - 1)] if place == 0 else [*[plain] * (parts - 1), end]

    def sliced(self, splits: int) -> Costs:
        """The costs of one slice, where every microbatch is cut into ``splits`` equal ones."""
        return self if splits == 1 else replace(self, stages=tuple(stage.share(splits) for stage in self.stages))

    def seconds(self, kind: Kind, stage: int, recomputed: bool = False) -> float:
        """Seconds of a pass; of a copy, with no other copy at the same time.

        Args:
            stage: where it runs; passes of the vocabulary take the same on every rank.
            recomputed: whether the schedule has an R for the microbatch, so that F keeps no more than ``checkpoint``.
        """
        if kind.row.copy:
            return self.stages[stage].moved(recomputed) * float(getattr(self.copies, kind.row.seconds))
        return (self.vocabulary if kind.row.shard else self.stages[stage]).seconds(kind)

    def braid(self, stage: int, kind: Kind, other: int) -> tuple[float, float]:
        """Seconds of a braid: until its forward is over, and from then on.

        Args:
            stage: of its forward.
            kind, other: of its backward, and its stage.
        """
        ours, theirs = self.stages[stage], self.stages[other]
        if not (ours.has_parts or theirs.has_parts):
            return ours.seconds(Kind.F), theirs.seconds(kind)
        output, whole = braid_seconds(ours.parts(Kind.F), theirs.parts(kind))
        return output, whole - output

    def allocated(self, kind: Kind, stage: int, recomputed: bool = False) -> float:
        """Activation memory that a pass on a stage allocates (positive) or frees (negative) by its end."""
        return self.vocabulary.allocated(kind) if kind.row.shard else self.stages[stage].allocated(kind, recomputed)

    @property
    def communicating(self) -> tuple[float, ...]:
        """Seconds of every stage in which layers communicate, in F and the backward of one microbatch."""
        return tuple(sum(map(stage.value, (*_ALL_TO_ALL["forward"], *_ALL_TO_ALL["backward"]))) for stage in self.stages)

    def hidden(self) -> Costs:
        """The costs if all that layers communicate took no time: no schedule, with any braids, is shorter than at these."""

        def without(stage: StageCosts) -> StageCosts:
            less = {name: sum(map(stage.value, parts)) for name, parts in _ALL_TO_ALL.items()}
            seconds = {name: stage.value(name) - hidden for name, hidden in less.items()}
            fused = None if stage.fused is None else min(stage.fused, seconds["backward"] + stage.weight)
            changed: dict[str, Any] = {"fused": fused, **seconds, **dict.fromkeys(PARTS)}
            return replace(stage, **changed)

        return replace(self, stages=tuple(map(without, self.stages)))

    def slowest(self, lane: Lane) -> float:
        """The share of its speed that a pass on a lane keeps while all other lanes run."""
        return self.copies.slowest if lane in COPY_LANES else 1.0

    def k(self, recomputed: Set[int] = frozenset()) -> float:
        """What copying all activations to host memory and back takes, over what passes do (Wan et al., "PipeOffload", section 3).

        Args:
            recomputed: the stages that run R, which have less to be moved and take longer.
        """
        again = [index in recomputed for index in range(len(self.stages))]
        work = sum(stage.total + stage.recompute * more for stage, more in zip(self.stages, again, strict=True))
        moved = sum(stage.moved(more) for stage, more in zip(self.stages, again, strict=True))
        return moved * (self.copies.to_host + self.copies.to_device) / work if work else 0.0

    @property
    def exchange(self) -> float:
        """Seconds of a collective of the vocabulary."""
        return self.hop if self.vocabulary.exchange is None else self.vocabulary.exchange

    def fields(self) -> dict[str, Any]:
        """What ``to_json`` writes; ``fused`` and ``movable`` only where they are given, the vocabulary and copies where they cost
        something."""
        rows = [by_name(stage) for stage in self.stages]
        spread = {} if self.vocabulary == VocabularyCosts() else {"vocabulary": by_name(self.vocabulary)}
        copies = {} if self.copies == CopyCosts() else {"copies": asdict(self.copies)}
        return {"hop": self.hop, "stages": rows} | spread | copies

    def to_json(self) -> str:
        """One JSON object, ``{"hop": .., "stages": [{"forward": .., ..}, ..]}``, that ``from_json`` reads back."""
        return json.dumps(self.fields())

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read what ``to_json`` wrote, or a person.

        ``hop`` is 0 where it is left out. A stage must have ``forward``, ``backward`` and ``weight``; where ``retained`` is left
        out, all of ``activation`` is held until W; where ``recompute`` is, R takes what F does. ``vocabulary`` has the fields of
        ``VocabularyCosts``, each 0 where it is left out, and ``copies`` those of ``CopyCosts``, with its defaults.

        Raises:
            ValueError: not JSON, or as ``from_fields``.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"not costs: invalid JSON ({error})") from None
        return cls.from_fields(data)

    @classmethod
    def from_fields(cls, data: object) -> Costs:
        """Costs from the object that ``from_json`` reads.

        Raises:
            ValueError: a field is missing, unknown, no number, or a number out of range; the stage is named.
        """
        rows = data.get("stages") if isinstance(data, dict) else None
        known = {"hop", "stages", "vocabulary", "copies"}
        if not isinstance(data, dict) or not isinstance(rows, list) or not rows or not data.keys() <= known:
            raise ValueError('not costs: expected {"hop": .., "stages": [{"forward": .., "backward": .., "weight": ..}, ..]}')
        allowed = [field.name for field in fields(StageCosts)]
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                raise ValueError(f"stage {index}: expected the costs of the stage by name, got {row!r}")
            missing = [name for name in allowed[:3] if name not in row]
            unknown = [name for name in row if name not in allowed]
            if missing or unknown:
                problem = f"missing {', '.join(missing)}" if missing else f"unknown cost {unknown[0]!r}"
                raise ValueError(f"stage {index}: {problem}; costs of a stage are {', '.join(allowed)}")
            parts = [name for name in PARTS if row.get(name) is not None]
            if parts and len(parts) < len(PARTS):
                left_out = ", ".join(name for name in PARTS if name not in parts)
                change = "give all parts of the layers (0 for what there is none of), or none"
                raise ValueError(f"stage {index}: {', '.join(parts)} without {left_out}: {change}")
            for name, value in row.items():
                if not (value is None and name in _MAY_FOLLOW):
                    _check_number(f"stage {index}: {name}", value)
        hop = data.get("hop", 0.0)
        _check_number("hop", hop)
        stages = []
        for row in rows:
            given: dict[str, Any] = {name: value if value is None else float(value) for name, value in row.items()}
            stages.append(StageCosts(**{"retained": given.get("activation", 1.0), "recompute": given["forward"], **given}))
        return cls(tuple(stages), float(hop), **_shared(data))


def _sum(stages: Sequence[StageCosts]) -> StageCosts:
    """The costs of one stage with the layers of several."""
    return combined(sum, stages)


def combined(combine: Callable[[Sequence[float]], float], stages: Sequence[StageCosts]) -> StageCosts:
    """A stage whose every cost is made from those of several; what is left to follow in all of them is left to follow."""
    costs: dict[str, Any] = {}
    for field in fields(StageCosts):
        given = any(getattr(stage, field.name) is not None for stage in stages)
        costs[field.name] = combine([stage.value(field.name) for stage in stages]) if given else None
    return StageCosts(**costs)


_MAY_FOLLOW = ("fused", "movable", *PARTS, "layers")  # from other costs, where they are None


def by_name(costs: StageCosts | VocabularyCosts) -> dict[str, Any]:
    """Costs by name, without those that are left to follow from others."""
    return {name: value for name, value in asdict(costs).items() if value is not None}


def _shared(data: dict[str, Any]) -> dict[str, Any]:
    """The costs that are not of one stage."""
    costs: dict[str, Any] = {}
    for what, kind in (("vocabulary", VocabularyCosts), ("copies", CopyCosts)):
        row, allowed = data.get(what, {}), [field.name for field in fields(kind)]
        if not isinstance(row, dict) or not row.keys() <= set(allowed):
            raise ValueError(f"{what}: expected costs by name, of {', '.join(allowed)}, got {row!r}")
        for name, value in row.items():
            _check_number(f"{what}: {name}", value)
        numbers: dict[str, Any] = {name: value if name == "switch" else float(value) for name, value in row.items()}
        costs[what] = kind(**numbers)
    return costs


# The default where F, B and W take 1: an output layer that adds a third to a rank's work.
EQUAL_SHARDS = VocabularyCosts(S=0.5, T=0.5)


def with_equal_copies(costs: Costs) -> Costs:
    """Costs with the default of copies: k is 1, and both directions take the same time."""
    work, moved = (sum(values) for values in zip(*((stage.total, stage.moved()) for stage in costs.stages), strict=True))
    seconds = work / moved / 2 if moved else 0.0
    return replace(costs, copies=replace(costs.copies, to_host=seconds, to_device=seconds))


def is_cost(value: object) -> bool:
    """Whether what a user gives can be seconds or bytes: a number in ``COST_RANGE``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (value == 0 or 1e-100 <= value <= 1e100)


def _check_number(name: str, value: object) -> None:
    if not is_cost(value):
        raise ValueError(f"{name} must be a number, {COST_RANGE}, got {value!r}")


def uniform(
    placement: Placement,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    hop: float = 0.0,
    activation: float = 1.0,
    retained: float = 1.0,
    vocabulary: VocabularyCosts | None = None,
) -> Costs:
    """Equal stages: the arguments are one rank's whole share of one microbatch, of which a chunk takes its part.

    That is 1/chunks of it, and the whole where every chunk is of another replica of the model.

    Args:
        vocabulary: what a rank's shard costs where the vocabulary is spread.
    """
    stage = StageCosts(forward, backward, weight, activation, retained).share(placement.chunks_per_replica)
    return Costs((stage,) * (placement.ranks * placement.chunks), hop, vocabulary or VocabularyCosts())
