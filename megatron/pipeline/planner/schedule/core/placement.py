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

    With several ``replicas`` the ranks hold the model more than once, as bidirectional pipelines do: the stages are cut into
    that many runs of equal length, each run is one whole model, and microbatch i goes through replica i mod ``replicas``.

    Raises:
        ValueError: the rows differ in length, are not a permutation of the stages, or cannot be cut into the replicas.
    """

    stages: tuple[tuple[int, ...], ...]
    replicas: int = 1

    def __post_init__(self) -> None:
        if not self.stages or not self.stages[0]:
            raise ValueError("a placement needs at least one rank with at least one chunk")
        if len({len(row) for row in self.stages}) != 1:
            raise ValueError(f"every rank must hold the same number of chunks, got {[len(row) for row in self.stages]}")
        count = self.ranks * self.chunks
        if sorted(stage for row in self.stages for stage in row) != list(range(count)):
            raise ValueError(
                f"every stage 0..{count - 1} needs exactly one (rank, chunk), got {[list(row) for row in self.stages]}"
            )
        if self.replicas < 1 or count % self.replicas:
            raise ValueError(f"{count} stages cannot be cut into {self.replicas} models of equal length")

    @property
    def ranks(self) -> int:
        return len(self.stages)

    @property
    def chunks(self) -> int:
        return len(self.stages[0])

    @property
    def last_stage(self) -> int:
        return self.ranks * self.chunks - 1

    @property
    def depth(self) -> int:
        return self.ranks * self.chunks // self.replicas

    @property
    def chunks_per_replica(self) -> int:
        """Number of its chunks that a rank runs for one microbatch, where every replica is spread evenly."""
        return max(1, self.chunks // self.replicas)

    def replica(self, stage: int) -> int:
        return stage // self.depth

    def is_first(self, stage: int) -> bool:
        """Tell whether a model begins with this stage."""
        return stage % self.depth == 0

    def is_last(self, stage: int) -> bool:
        """Tell whether a model ends with this stage."""
        return (stage + 1) % self.depth == 0

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


def bidirectional(ranks: int) -> Placement:
    """The model twice, once down the ranks (chunk 0) and once up (chunk 1): what DualPipe and Chimera use."""
    return Placement(tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)), replicas=2)


def from_rows(rows: Sequence[Sequence[int]], replicas: int = 1) -> Placement:
    """A general placement from ``rows[rank][chunk] = stage``."""
    return Placement(tuple(tuple(row) for row in rows), replicas)
