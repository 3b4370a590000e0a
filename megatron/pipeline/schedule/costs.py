"""What passes cost: seconds and bytes of every pass on every stage, and of every hop."""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron.pipeline.schedule.passes import Kind
from megatron.pipeline.schedule.placement import Placement


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

    @property
    def total(self) -> float:
        """Seconds of one microbatch: F + B + W."""
        return self.forward + self.backward + self.weight

    def share(self, parts: int) -> StageCosts:
        """The costs of one of ``parts`` equal parts."""
        values = (getattr(self, field.name) for field in fields(self))
        return StageCosts(*(None if value is None else value / parts for value in values))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Costs:
    """The costs of every stage, and the seconds of one hop between neighbouring ranks.

    Raises:
        ValueError: a time or size is negative or not finite, or more is retained after B, or kept for R, than F allocates.
    """

    stages: tuple[StageCosts, ...]
    hop: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.hop < float("inf"):
            raise ValueError(f"the hop must take 0 seconds or more, got {self.hop}")
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
        return self if splits == 1 else Costs(tuple(stage.share(splits) for stage in self.stages), self.hop)


def uniform(
    placement: Placement,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    hop: float = 0.0,
    activation: float = 1.0,
    retained: float = 1.0,
) -> Costs:
    """Equal stages: the arguments are one rank's whole share of one microbatch, of which a chunk takes its part.

    That is 1/chunks of it, and the whole where every chunk is of another replica of the model.
    """
    stage = StageCosts(forward, backward, weight, activation, retained).share(placement.chunks_per_replica)
    return Costs((stage,) * (placement.ranks * placement.chunks), hop)
