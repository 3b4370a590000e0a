"""What passes cost: seconds and bytes of every pass on every stage, and of every hop."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pipeline.schedule.passes import Kind
from megatron.pipeline.schedule.placement import Placement


@dataclass(frozen=True)
class StageCosts:
    """The costs of one stage, for one microbatch, in any unit of time and any unit of memory.

    Attributes:
        forward, backward, weight: seconds of F, B and W; a fused BW takes ``backward + weight``.
        activation: what F allocates, held until B ends.
        retained: how much of that is still held after B, until W ends.
    """

    forward: float
    backward: float
    weight: float
    activation: float = 1.0
    retained: float = 1.0

    def seconds(self, kind: Kind) -> float:
        match kind:
            case Kind.F:
                return self.forward
            case Kind.B:
                return self.backward
            case Kind.W:
                return self.weight
            case Kind.BW:
                return self.backward + self.weight

    def allocated(self, kind: Kind) -> float:
        """Activation memory that a pass allocates (positive) or frees (negative) by its end."""
        match kind:
            case Kind.F:
                return self.activation
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


@dataclass(frozen=True)
class Costs:
    """The costs of every stage, and the seconds of one hop between neighbouring ranks.

    Raises:
        ValueError: a time or size is negative or not finite, or more is retained after B than F allocated.
    """

    stages: tuple[StageCosts, ...]
    hop: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.hop < float("inf"):
            raise ValueError(f"the hop must take 0 seconds or more, got {self.hop}")
        for index, stage in enumerate(self.stages):
            for field in ("forward", "backward", "weight", "activation", "retained"):
                if not 0 <= getattr(stage, field) < float("inf"):
                    raise ValueError(f"{field} of stage {index} must be a number of at least 0, got {getattr(stage, field)}")
            if stage.retained > stage.activation:
                raise ValueError(
                    f"stage {index} would retain {stage.retained} after B of the {stage.activation} that F allocated; "
                    "retained must not be more"
                )


def uniform(
    placement: Placement,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    hop: float = 0.0,
    activation: float = 1.0,
    retained: float = 1.0,
) -> Costs:
    """Equal stages: the arguments are one rank's whole share of one microbatch, of which a chunk takes 1/chunks."""
    share = placement.chunks
    stage = StageCosts(forward / share, backward / share, weight / share, activation / share, retained / share)
    return Costs((stage,) * (placement.ranks * placement.chunks), hop)
