"""What passes cost: seconds and bytes of every pass on every stage, and of every hop."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megatron.pipeline.schedule.passes import Kind
from megatron.pipeline.schedule.placement import Placement

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
    """

    forward: float
    backward: float
    weight: float
    activation: float = 1.0
    retained: float = 1.0
    fused: float | None = None
    recompute: float = 0.0
    checkpoint: float = 0.0

    def seconds(self, kind: Kind) -> float:
        match kind:
            case Kind.F:
                return self.forward
            case Kind.R:
                return self.recompute
            case Kind.B:
                return self.backward
            case Kind.W:
                return self.weight
            case Kind.BW:
                return self.backward + self.weight if self.fused is None else self.fused
            case _:
                raise AssertionError(f"{kind} is of no stage")

    def allocated(self, kind: Kind, recomputed: bool = False) -> float:
        """Activation memory that a pass allocates (positive) or frees (negative) by its end.

        Args:
            recomputed: whether the schedule has an R for the microbatch, so that F keeps no more than ``checkpoint``.
        """
        match kind:
            case Kind.F:
                return self.checkpoint if recomputed else self.activation
            case Kind.R:
                return self.activation - self.checkpoint
            case Kind.B:
                return self.retained - self.activation
            case Kind.W:
                return -self.retained
            case Kind.BW:
                return -self.activation
            case _:
                raise AssertionError(f"{kind} is of no stage")

    @property
    def total(self) -> float:
        """Seconds of one microbatch: F + B + W."""
        return self.forward + self.backward + self.weight

    def share(self, parts: int) -> StageCosts:
        """The costs of one of ``parts`` equal parts."""
        values = (getattr(self, field.name) for field in fields(self))
        return StageCosts(*(None if value is None else value / parts for value in values))  # type: ignore[arg-type]


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
        return float(getattr(self, kind))

    def allocated(self, kind: Kind) -> float:
        """Activation memory that a pass allocates (positive) or frees (negative) by its end."""
        return self.activation if kind is Kind.S else -self.activation if kind is Kind.T else 0.0

    @property
    def total(self) -> float:
        """Seconds of one microbatch."""
        return self.S + self.T + self.IF + self.IB


@dataclass(frozen=True)
class Costs:
    """The costs of every stage, the seconds of one hop between neighbouring ranks, and what a spread vocabulary costs.

    Raises:
        ValueError: a time or size is negative or not finite, or more is retained after B, or kept for R, than F allocates.
    """

    stages: tuple[StageCosts, ...]
    hop: float = 0.0
    vocabulary: VocabularyCosts = VocabularyCosts()

    def __post_init__(self) -> None:
        if not 0 <= self.hop < float("inf"):
            raise ValueError(f"the hop must take 0 seconds or more, got {self.hop}")
        for field in fields(VocabularyCosts):
            value = getattr(self.vocabulary, field.name)
            if not (value is None and field.name == "exchange") and not 0 <= value < float("inf"):
                raise ValueError(f"{field.name} of the vocabulary must be a number of at least 0, got {value}")
        for index, stage in enumerate(self.stages):
            for field in fields(StageCosts):
                value = getattr(stage, field.name)
                if not (value is None and field.name == "fused") and not 0 <= value < float("inf"):
                    raise ValueError(f"{field.name} of stage {index} must be a number of at least 0, got {value}")
            if stage.retained > stage.activation:
                raise ValueError(
                    f"stage {index} would retain {stage.retained} after B of the {stage.activation} that F allocated; "
                    "retained must not be more"
                )
            if stage.checkpoint > stage.activation:
                raise ValueError(
                    f"stage {index} would keep {stage.checkpoint} for R, more than the {stage.activation} without R; "
                    "checkpoint must not be more"
                )

    def sliced(self, splits: int) -> Costs:
        """The costs of one slice, where every microbatch is cut into ``splits`` equal ones."""
        return self if splits == 1 else replace(self, stages=tuple(stage.share(splits) for stage in self.stages))

    @property
    def exchange(self) -> float:
        """Seconds of a collective of the vocabulary."""
        return self.hop if self.vocabulary.exchange is None else self.vocabulary.exchange

    def fields(self) -> dict[str, Any]:
        """What ``to_json`` writes; ``fused`` only where it is given, and the vocabulary where it costs something."""
        rows = [by_name(stage) for stage in self.stages]
        spread = {} if self.vocabulary == VocabularyCosts() else {"vocabulary": by_name(self.vocabulary)}
        return {"hop": self.hop, "stages": rows} | spread

    def to_json(self) -> str:
        """One JSON object, ``{"hop": .., "stages": [{"forward": .., ..}, ..]}``, that ``from_json`` reads back."""
        return json.dumps(self.fields())

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read what ``to_json`` wrote, or a person.

        ``hop`` is 0 where it is left out. A stage must have ``forward``, ``backward`` and ``weight``; where ``retained`` is left
        out, all of ``activation`` is held until W; where ``recompute`` is, R takes what F does. ``vocabulary`` has the fields of
        ``VocabularyCosts``, each 0 where it is left out.

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
        known = {"hop", "stages", "vocabulary"}
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
            for name, value in row.items():
                if not (value is None and name == "fused"):
                    _check_number(f"stage {index}: {name}", value)
        hop = data.get("hop", 0.0)
        _check_number("hop", hop)
        stages = []
        for row in rows:
            given: dict[str, Any] = {name: value if value is None else float(value) for name, value in row.items()}
            stages.append(StageCosts(**{"retained": given.get("activation", 1.0), "recompute": given["forward"], **given}))
        return cls(tuple(stages), float(hop), _vocabulary(data.get("vocabulary", {})))


def by_name(costs: StageCosts | VocabularyCosts) -> dict[str, Any]:
    """Costs by name, without those that are left to follow from others."""
    return {name: value for name, value in asdict(costs).items() if value is not None}


def _vocabulary(row: object) -> VocabularyCosts:
    allowed = [field.name for field in fields(VocabularyCosts)]
    if not isinstance(row, dict) or not row.keys() <= set(allowed):
        raise ValueError(f"vocabulary: expected costs by name, of {', '.join(allowed)}, got {row!r}")
    for name, value in row.items():
        _check_number(f"vocabulary: {name}", value)
    return VocabularyCosts(**{name: float(value) for name, value in row.items()})


# Where nobody says, and F, B and W take 1: an output layer that adds a third to a rank's work.
EQUAL_SHARDS = VocabularyCosts(S=0.5, T=0.5)


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
