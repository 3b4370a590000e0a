"""A schedule: the ordered passes of every rank, plus the placement. Data, nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron.pipeline.schedule.passes import Kind, Pass
from megatron.pipeline.schedule.placement import Placement, from_rows


@dataclass(frozen=True)
class Schedule:
    """What every rank computes, in which order.

    Nothing is checked here: a schedule may come from a user's file, and ``verify`` names what is wrong with it.

    Attributes:
        name: the family's name, or the user's.
        placement: which stage each (rank, chunk) holds.
        microbatches: how many microbatches one iteration has.
        passes: for each rank, its passes in the order they run.
    """

    name: str
    placement: Placement
    microbatches: int
    passes: tuple[tuple[Pass, ...], ...]

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    def predecessors(self, rank: int, work: Pass) -> Iterator[tuple[int, Pass]]:
        """The passes whose results ``work`` needs, as (rank, pass).

        F needs the previous stage's F; B and BW need their own F and the next stage's B or BW; W needs its own B.
        """
        stage = self.placement.stage(rank, work.chunk)
        microbatch = work.microbatch
        if work.kind is Kind.F:
            if stage > 0:
                before, chunk = self.placement.home(stage - 1)
                yield before, Pass(Kind.F, microbatch, chunk)
        elif work.kind is Kind.W:
            yield rank, Pass(Kind.B, microbatch, work.chunk)
        else:
            yield rank, Pass(Kind.F, microbatch, work.chunk)
            if stage < self.placement.last_stage:
                after, chunk = self.placement.home(stage + 1)
                yield after, Pass(self.backward_kind(after, microbatch, chunk), microbatch, chunk)

    def backward_kind(self, rank: int, microbatch: int, chunk: int) -> Kind:
        """Whether this rank runs the backward of (microbatch, chunk) fused (BW) or split (B and W)."""
        return Kind.BW if Pass(Kind.BW, microbatch, chunk) in self._pass_sets[rank] else Kind.B

    @cached_property
    def _pass_sets(self) -> tuple[frozenset[Pass], ...]:
        return tuple(frozenset(passes) for passes in self.passes)

    def forward_only(self) -> Schedule:
        """The same schedule with its forwards alone, for evaluation: dropping passes that no F needs keeps it valid."""
        forwards = tuple(tuple(work for work in passes if work.kind is Kind.F) for passes in self.passes)
        return Schedule(f"{self.name} (forward only)", self.placement, self.microbatches, forwards)

    def to_json(self) -> str:
        """One JSON object that ``from_json`` reads back into an equal schedule."""
        return json.dumps(
            {
                "schedule": self.name,
                "placement": self.placement.stages,
                "microbatches": self.microbatches,
                "passes": [[str(work) for work in passes] for passes in self.passes],
            }
        )

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
        if type(microbatches) is not int or microbatches < 1:
            raise ValueError(f"not a schedule: microbatches must be a whole number of at least 1, got {microbatches!r}")
        if not _is_table(rows) or not all(type(stage) is int for row in rows for stage in row):
            raise ValueError("not a schedule: placement must be a list of stages per rank, such as [[0, 3], [1, 2]]")
        if not _is_table(passes):
            raise ValueError("not a schedule: passes must be a list of passes per rank")
        placement = from_rows(rows)
        if len(passes) != placement.ranks:
            raise ValueError(f"not a schedule: passes of {len(passes)} ranks for a placement of {placement.ranks}")
        return cls(str(name), placement, microbatches, tuple(tuple(Pass.parse(text) for text in row) for row in passes))


class ScheduleError(ValueError):
    """A schedule, or what it was lowered to, breaks a rule; the message names the rank and the first pass that does."""


def _is_table(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) for row in value)
