"""A schedule: the ordered passes of every rank, plus the placement. Data, nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.pipeline.schedule.core.passes import Kind, Pass, Vocabulary
from megatron.pipeline.schedule.core.placement import Placement, from_rows

# Of what IF makes a rank holds that of at most so many microbatches, and so it should of what waits for T and IB.
MOST_WAITING = 2


@dataclass(frozen=True)
class Schedule:
    """What every rank computes, in which order.

    Nothing is checked here: a schedule may come from a user's file, and ``verify`` names what is wrong with it.

    Attributes:
        name: the family's name, or the user's.
        placement: which stage each (rank, chunk) holds.
        microbatches: how many microbatches one iteration has.
        passes: for each rank, its passes in the order they run.
        splits: into how many slices along the sequence every microbatch is cut; each slice has passes of its own.
        vocabulary: how the vocabulary is spread over all ranks; None where the first and the last stage have it.
    """

    name: str
    placement: Placement
    microbatches: int
    passes: tuple[tuple[Pass, ...], ...]
    splits: int = 1
    vocabulary: Vocabulary | None = None

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def slices(self) -> int:
        """How many numbers passes count: microbatches, or all their slices."""
        return self.microbatches * self.splits

    def numbers(self, rank: int, chunk: int) -> range:
        """The microbatches (slices) that go through a chunk: all, or with several replicas its share of them."""
        return range(self.placement.replica(self.placement.stage(rank, chunk)), self.slices, self.placement.replicas)

    def predecessors(self, rank: int, work: Pass) -> Iterator[tuple[int, Pass]]:
        """The passes whose results ``work`` needs, as (rank, pass).

        F needs the previous stage's F; B and BW need their own F, or R where there is one, and the next stage's B or BW;
        R needs its own F; W needs its own B. D2H needs its own F, H2D that D2H, and R, or B where there is none, that H2D. That
        slices of one microbatch need each other follows from their order.

        With a spread vocabulary the first F needs IF of all ranks, S the last F, T the S of all ranks, the last B all S (one
        barrier) or all T (two), and IB the first B. IF needs that the parts of ``MOST_WAITING`` microbatches earlier are gone.
        """
        stage = self.placement.stage(rank, work.chunk)
        microbatch = work.microbatch
        if work.kind is Kind.F:
            if not self.placement.is_first(stage):
                before, chunk = self.placement.home(stage - 1)
                yield before, Pass(Kind.F, microbatch, chunk)
            elif self.vocabulary:
                yield from self._everywhere(Kind.IF, microbatch)
        elif work.kind.is_of_vocabulary:
            yield from self._shard_predecessors(work)
        elif work.kind is Kind.W:
            yield rank, Pass(Kind.B, microbatch, work.chunk)
        elif work.kind is Kind.H2D:
            yield rank, Pass(Kind.D2H, microbatch, work.chunk)
        elif work.kind in (Kind.R, Kind.D2H):
            yield rank, Pass(self._kept_by(rank, work) if work.kind is Kind.R else Kind.F, microbatch, work.chunk)
        else:
            kept = Kind.R if self.recomputes(rank, work) else self._kept_by(rank, work)
            yield rank, Pass(kept, microbatch, work.chunk)
            if not self.placement.is_last(stage):
                after, chunk = self.placement.home(stage + 1)
                yield after, Pass(self.backward_kind(after, microbatch, chunk), microbatch, chunk)
            elif self.vocabulary:
                yield from self._everywhere(Kind.S if self.vocabulary is Vocabulary.ONE_BARRIER else Kind.T, microbatch)

    def _shard_predecessors(self, work: Pass) -> Iterator[tuple[int, Pass]]:
        """Of a pass of the vocabulary."""
        microbatch = work.microbatch
        match work.kind:
            case Kind.S:
                last, chunk = self.placement.home(self.placement.last_stage)
                yield last, Pass(Kind.F, microbatch, chunk)
            case Kind.T:
                yield from self._everywhere(Kind.S, microbatch)
            case Kind.IF if microbatch >= MOST_WAITING:
                yield from self._everywhere(Kind.IF, microbatch - MOST_WAITING)
            case Kind.IB:
                first, chunk = self.placement.home(0)
                yield first, Pass(self.backward_kind(first, microbatch, chunk), microbatch, chunk)

    def _everywhere(self, kind: Kind, microbatch: int) -> Iterator[tuple[int, Pass]]:
        return ((rank, Pass(kind, microbatch)) for rank in range(self.ranks))

    def backward_kind(self, rank: int, microbatch: int, chunk: int) -> Kind:
        """Whether this rank runs the backward of (microbatch, chunk) fused (BW) or split (B and W)."""
        return Kind.BW if Pass(Kind.BW, microbatch, chunk) in self._pass_sets[rank] else Kind.B

    def recomputes(self, rank: int, work: Pass) -> bool:
        """Whether this rank runs R for the microbatch and chunk of a pass."""
        return Pass(Kind.R, work.microbatch, work.chunk) in self._pass_sets[rank]

    def offloads(self, rank: int, work: Pass) -> bool:
        """Whether this rank copies what F keeps of the microbatch and chunk of a pass to host memory, and back."""
        return Pass(Kind.D2H, work.microbatch, work.chunk) in self._pass_sets[rank]

    @cached_property
    def has_copies(self) -> bool:
        """Whether any rank offloads anything."""
        return any(work.kind.is_copy for passes in self.passes for work in passes)

    def _kept_by(self, rank: int, work: Pass) -> Kind:
        """What leaves on the device what F has kept for later."""
        return Kind.H2D if self.offloads(rank, work) else Kind.F

    @cached_property
    def _pass_sets(self) -> tuple[frozenset[Pass], ...]:
        return tuple(frozenset(passes) for passes in self.passes)

    def forward_only(self) -> Schedule:
        """The same schedule with its forwards alone, for evaluation: dropping passes that they do not need keeps it valid."""
        forwards = tuple(tuple(work for work in passes if work.kind.is_forward) for passes in self.passes)
        return replace(self, name=f"{self.name} (forward only)", passes=forwards)

    def to_json(self) -> str:
        """One JSON object that ``from_json`` reads back into an equal schedule."""
        return json.dumps(self.fields())

    def fields(self) -> dict[str, Any]:
        """What ``to_json`` writes; ``replicas`` and ``splits`` only where they are not 1, ``vocab_parallel`` where it is."""
        return {
            "schedule": self.name,
            "placement": self.placement.stages,
            **({"replicas": self.placement.replicas} if self.placement.replicas > 1 else {}),
            "microbatches": self.microbatches,
            **({"splits": self.splits} if self.splits > 1 else {}),
            **({"vocab_parallel": self.vocabulary} if self.vocabulary else {}),
            "passes": [[str(work) for work in passes] for passes in self.passes],
        }

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read what ``to_json`` or ``mpipe plan --json`` wrote.

        Raises:
            ValueError: not JSON, a field is missing or of the wrong type, or a pass cannot be read.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a schedule: invalid JSON ({error})") from None
        if not isinstance(data, dict):
            raise ValueError(f"not a schedule: expected a JSON object, got {type(data).__name__}")
        missing = [key for key in ("schedule", "placement", "microbatches", "passes") if key not in data]
        if missing:
            raise ValueError(f"not a schedule: missing {', '.join(missing)}")
        name, rows, microbatches, passes = data["schedule"], data["placement"], data["microbatches"], data["passes"]
        replicas, splits = data.get("replicas", 1), data.get("splits", 1)
        for field, value in (("microbatches", microbatches), ("replicas", replicas), ("splits", splits)):
            if type(value) is not int or value < 1:
                raise ValueError(f"not a schedule: {field} must be a whole number of at least 1, got {value!r}")
        if replicas > 1 and splits > 1:
            raise ValueError("not a schedule: replicas and splits cannot both be above 1")
        vocabulary = data.get("vocab_parallel")
        if type(vocabulary) is int:
            vocabulary = str(vocabulary)
        if vocabulary is not None and vocabulary not in list(Vocabulary):
            raise ValueError(f"not a schedule: vocab_parallel must be one of {', '.join(Vocabulary)}, got {vocabulary!r}")
        if vocabulary is not None and (replicas > 1 or splits > 1):
            raise ValueError("not a schedule: a spread vocabulary goes with neither replicas nor splits above 1")
        if not _is_table(rows) or not all(type(stage) is int for row in rows for stage in row):
            raise ValueError("not a schedule: placement must be a list of stages per rank, such as [[0, 3], [1, 2]]")
        if not _is_table(passes):
            raise ValueError("not a schedule: passes must be a list of passes per rank")
        placement = from_rows(rows, replicas)
        if len(passes) != placement.ranks:
            raise ValueError(f"not a schedule: passes of {len(passes)} ranks for a placement of {placement.ranks}")
        order = tuple(_read_row(rank, row) for rank, row in enumerate(passes))
        return cls(str(name), placement, microbatches, order, splits, Vocabulary(vocabulary) if vocabulary else None)


class ScheduleError(ValueError):
    """A schedule, or what it was lowered to, breaks a rule; the message names the rank and the first pass that does."""


def _read_row(rank: int, row: list[object]) -> tuple[Pass, ...]:
    try:
        return tuple(map(Pass.parse, row))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"rank {rank}: {error}") from None


def _is_table(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) for row in value)
