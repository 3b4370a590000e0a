"""Place of a chunk of this rank in the model."""

from __future__ import annotations

from megatron.pipeline.planner import Placement


class Stage:
    """A chunk of a rank.

    Attributes:
        vp_stage: the chunk's number on its rank, or None where a rank has one: as upstream counts.
        first, last: whether the model begins and ends here.
    """

    def __init__(self, placement: Placement, rank: int, chunk: int) -> None:
        number = placement.stage(rank, chunk)
        self.vp_stage = chunk if placement.chunks > 1 else None
        self.first, self.last = number == 0, number == placement.last_stage
