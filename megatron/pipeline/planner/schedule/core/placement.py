"""Placement: the stage of the model that each (rank, chunk) holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Placement", "from_rows", "interleaved", "linear", "v", "wave"]


@dataclass(frozen=True)
class Placement:
    """The map (rank, chunk) -> stage, as ``stages[rank][chunk]``.

    Every stage 0 .. ranks*chunks-1 has exactly one home, and all ranks hold the same number of chunks.

    Raises:
        ValueError: the rows differ in length, or are not a permutation of the stages.
    """

    stages: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.stages or not self.stages[0]:
            raise ValueError("a placement needs at least one rank with at least one chunk")
        if len({len(row) for row in self.stages}) != 1:
            raise ValueError(f"every rank must hold the same number of chunks, got {[len(row) for row in self.stages]}")
        if sorted(stage for row in self.stages for stage in row) != list(range(self.depth)):
            raise ValueError(
                f"every stage 0..{self.last_stage} needs exactly one (rank, chunk), got {[list(row) for row in self.stages]}"
            )

    @property
    def ranks(self) -> int:
        return len(self.stages)

    @property
    def chunks(self) -> int:
        return len(self.stages[0])

    @property
    def last_stage(self) -> int:
        return self.depth - 1

    @property
    def depth(self) -> int:
        """Number of stages."""
        return self.ranks * self.chunks

    def is_first(self, stage: int) -> bool:
        """Tell whether the model begins with this stage."""
        return stage == 0

    def is_last(self, stage: int) -> bool:
        """Tell whether the model ends with this stage."""
        return stage == self.last_stage

    def stage(self, rank: int, chunk: int = 0) -> int:
        return self.stages[rank][chunk]

    def home(self, stage: int) -> tuple[int, int]:
        """The (rank, chunk) that holds a stage."""
        return self._homes[stage]

    @cached_property
    def _homes(self) -> dict[int, tuple[int, int]]:
        return {stage: (rank, chunk) for rank, row in enumerate(self.stages) for chunk, stage in enumerate(row)}


def linear(ranks: int) -> Placement:
    """One stage a rank, in order: what 1F1B, ZB-H1 and ZB-H2 use."""
    return interleaved(ranks, 1)


def interleaved(ranks: int, chunks: int) -> Placement:
    """Chunk c of rank r is stage c*ranks + r: Megatron's virtual pipeline."""
    return Placement(tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks)))


def wave(ranks: int, chunks: int) -> Placement:
    """Stages run down the ranks and back up again, ``chunks`` times: chunk c of rank r is c*ranks + r, or mirrored for odd c."""
    return Placement(
        tuple(
            tuple(chunk * ranks + (rank if chunk % 2 == 0 else ranks - 1 - rank) for chunk in range(chunks))
            for rank in range(ranks)
        )
    )


def v(ranks: int) -> Placement:
    """Two chunks in the shape of a V: rank r holds stages r and 2*ranks-1-r, so the first and the last stage share rank 0."""
    return wave(ranks, 2)


def from_rows(rows: Sequence[Sequence[int]]) -> Placement:
    """A general placement from ``rows[rank][chunk] = stage``."""
    return Placement(tuple(tuple(row) for row in rows))
