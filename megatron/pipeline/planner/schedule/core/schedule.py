"""A schedule: the ordered passes of every rank, plus the placement. Data, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, ClassVar

from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import Lane, Sources, needed_on_own_rank, sources
from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement, from_rows
from megatron.pipeline.planner.schedule.core.reading import NamedErrors, parse_json, printable


@dataclass(frozen=True)
class Schedule:
    """Order of the passes of every rank.

    Nothing is checked here: a schedule may come from a user's file, and ``verify`` names what is wrong with it.

    Attributes:
        name: the family's name, or the user's.
        placement: which stage each (rank, chunk) holds.
        microbatches: how many microbatches one iteration has.
        passes: for each rank, its passes in the order they run.
        splits: into how many slices along the sequence every microbatch is cut; each slice has passes of its own.
        vocabulary: how the vocabulary is spread over all ranks; None where the first and the last stage have it.
        shielded: the stages whose B has weight gradients behind its collectives between tensor-parallel ranks, which nothing
            else would hide: those of row-parallel linears, and of a linear before which there is none. W computes the others.
        frozen: the first stages in which nothing trains, and so B computes nothing: no message goes back to them.
        boundary: for each rank, what it runs between two iterations, among its own last and first passes (``core.boundary``);
            empty where that is not planned.
    """

    name: str
    placement: Placement
    microbatches: int
    passes: tuple[tuple[Pass, ...], ...]
    splits: int = 1
    vocabulary: Vocabulary | None = None
    shielded: frozenset[int] = frozenset()
    boundary: Order = ()
    frozen: int = 0
    _repr_svg_: ClassVar[Callable[..., str | None]]  # ``view.svg``, for notebooks

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    def costs(self, costs: Costs) -> Costs:
        """The costs of its passes: of slices where microbatches are cut, and of stages as they are shielded.

        Raises:
            ValueError: the costs are for another number of microbatches.
        """
        costs.check_microbatches(self.microbatches)
        return cutting.sliced(cutting.shielded(costs, self.shielded), self.splits)

    @property
    def slices(self) -> int:
        """Number of microbatches, or of all their slices."""
        return self.microbatches * self.splits

    def predecessors(self, rank: int, work: Pass) -> Iterator[tuple[int, Pass]]:
        """The passes whose results ``work`` needs, as (rank, pass); the table of kinds says which.

        That slices of one microbatch need each other follows from their order.
        """
        kind, microbatch, chunk = work
        for source in self.sources[kind, rank, chunk]:
            number = microbatch - source.need.delay
            if number >= 0:
                for other, its_chunk in source.homes:
                    yield other, self.rows[other].first_of(source.kinds, number, its_chunk)

    @cached_property
    def sources(self) -> Sources:
        """Passes that those of a kind need on a rank and chunk, and where these run."""
        return sources(self.placement, self.vocabulary)

    @cached_property
    def rows(self) -> tuple[RankPasses, ...]:
        return tuple(map(RankPasses, self.passes))

    def recomputes(self, rank: int, work: Pass) -> bool:
        """Tell whether this rank runs R for the microbatch and chunk of a pass."""
        return self.rows[rank].has(Kind.R, work)

    @cached_property
    def has_copies(self) -> bool:
        """Tell whether any rank offloads anything."""
        return any(kind.is_copy for row in self.rows for kind in row.kinds)

    @cached_property
    def reruns(self) -> bool:
        """Tell whether any rank runs forwards again, to recompute activations."""
        return any(Kind.R in row.kinds for row in self.rows)

    def forward_only(self) -> Schedule:
        """The same schedule with its forwards alone, for evaluation: dropping passes that they do not need keeps it valid."""
        forwards = tuple(tuple(work for work in passes if work.kind.is_forward) for passes in self.passes)
        return replace(self, name=f"{self.name} (forward only)", passes=forwards, boundary=())

    def to_json(self) -> str:
        """One JSON object that ``from_json`` reads back into an equal schedule."""
        return json.dumps(self.fields())

    def fields(self) -> dict[str, Any]:
        """Fields that ``to_json`` writes; ``splits`` only where it is not 1, others where there are any."""
        return {
            "schedule": self.name,
            "placement": self.placement.stages,
            "microbatches": self.microbatches,
            **({"splits": self.splits} if self.splits > 1 else {}),
            **({"vocab_parallel": self.vocabulary} if self.vocabulary else {}),
            **({"shielded": sorted(self.shielded)} if self.shielded else {}),
            **({"frozen": self.frozen} if self.frozen else {}),
            "passes": [[str(work) for work in passes] for passes in self.passes],
            **({"boundary": [[str(work) for work in row] for row in self.boundary]} if self.boundary else {}),
        }

    @classmethod
    def from_json(cls, text: str) -> Schedule:
        """Read what ``to_json`` or ``mpipe plan --json`` wrote.

        Raises:
            ValueError: not JSON, a field is missing or of the wrong type, or a pass cannot be read.
        """
        data = parse_json(text, "a schedule")
        if not isinstance(data, dict):
            raise ValueError(f"not a schedule: expected a JSON object, got {type(data).__name__}")
        missing = [key for key in ("schedule", "placement", "microbatches", "passes") if key not in data]
        if missing:
            trace = "this is a trace, for Perfetto: give the schedule itself, as mpipe plan -o writes it"
            raise ValueError(trace if "traceEvents" in data else f"not a schedule: missing {', '.join(missing)}")
        name, rows, microbatches, passes = data["schedule"], data["placement"], data["microbatches"], data["passes"]
        if data.get("replicas", 1) != 1:
            raise ValueError("not a schedule: ranks that hold every stage several times (replicas) are gone: plan dualpipe-v")
        splits = data.get("splits", 1)
        for field, value in (("microbatches", microbatches), ("splits", splits)):
            if type(value) is not int or value < 1:
                raise ValueError(f"not a schedule: {field} must be a whole number of at least 1, got {value!r}")
        vocabulary = data.get("vocab_parallel")
        if type(vocabulary) is int:
            vocabulary = str(vocabulary)
        if vocabulary is not None and vocabulary not in list(Vocabulary):
            raise ValueError(f"not a schedule: vocab_parallel must be one of {', '.join(Vocabulary)}, got {vocabulary!r}")
        if vocabulary is not None and splits > 1:
            raise ValueError("not a schedule: a spread vocabulary does not go with splits above 1")
        shielded, between = data.get("shielded", []), data.get("boundary", [])
        if not isinstance(shielded, list) or not all(type(stage) is int for stage in shielded):
            raise ValueError(f"not a schedule: shielded must be a list of stages, got {shielded!r}")
        if not _is_table(rows) or not all(type(stage) is int for row in rows for stage in row):
            raise ValueError("not a schedule: placement must be a list of stages per rank, such as [[0, 3], [1, 2]]")
        if wrong := [field for field in ("passes", "boundary") if not _is_table(data.get(field, []))]:
            raise ValueError(f"not a schedule: {wrong[0]} must be a list of passes per rank")
        placement = from_rows(rows)
        if len(passes) != placement.ranks:
            raise ValueError(f"not a schedule: passes of {len(passes)} ranks for a placement of {placement.ranks}")
        order, boundary = (tuple(_read_row(rank, row) for rank, row in enumerate(table)) for table in (passes, between))
        spread = Vocabulary(vocabulary) if vocabulary else None
        return cls(printable(str(name)), placement, microbatches, order, splits, spread, frozenset(shielded), boundary)


class RankPasses:
    """The passes of one rank, to look them up."""

    def __init__(self, passes: tuple[Pass, ...]) -> None:
        self.passes = passes
        self.kinds = frozenset(map(_KIND, passes))

    @cached_property
    def all(self) -> frozenset[Pass]:
        return frozenset(self.passes)

    @cached_property
    def slots(self) -> dict[Pass, int]:
        """Position of a pass in the order of its rank."""
        return {work: slot for slot, work in enumerate(self.passes)}

    def has(self, kind: Kind, work: Pass) -> bool:
        """Tell whether there is a pass of a kind, of the microbatch and chunk of another pass."""
        return kind in self.kinds and (kind, work.microbatch, work.chunk) in self.all

    def first_of(self, kinds: Sequence[Kind], microbatch: int, chunk: int) -> Pass:
        """The pass of the first kind that this rank runs for a microbatch and chunk, of the last kind if it runs none."""
        for kind in kinds:
            if kind in self.kinds and (kind is kinds[-1] or (kind, microbatch, chunk) in self.all):
                break
        return Pass(kind, microbatch, chunk)

    @cached_property
    def lanes(self) -> dict[Lane, list[Pass]]:
        """The passes of each lane in the order in which they run there: that of their places, or, where they start as soon as
        they can, that of the passes that they need."""
        lanes: dict[Lane, list[Pass]] = {kind.row.lane: [] for kind in self.kinds if kind.row.lane}
        starting = {kind: lanes[kind.row.lane] for kind in self.kinds if kind.row.lane and kind.row.starts}
        for work in self.passes if lanes else ():
            if work.kind in starting:
                starting[work.kind].append(work)
            for each in self.started_by(work):
                if each.kind.row.lane:
                    lanes[each.kind.row.lane].append(each)
        return lanes

    @cached_property
    def is_braided(self) -> bool:
        """Tell whether any pass runs as one with the pass before it."""
        return any(kind.row.braided for kind in self.kinds)

    def braids(self) -> Iterator[tuple[Pass, Pass]]:
        """Passes that run as one with the pass behind them, and those."""
        return ((work, after) for work, after in pairwise(self.passes) if after.kind.row.braided) if self.is_braided else iter(())

    def started_by(self, work: Pass) -> Iterator[Pass]:
        """The passes on lanes that start as soon as a pass has ended, which they need."""
        for kind in self._early.get(work.kind, ()):
            if self.has(kind, work):
                yield work._replace(kind=kind)

    @cached_property
    def _early(self) -> dict[Kind, list[Kind]]:
        """By kind, the kinds on lanes that start as soon as such a pass has ended."""
        found: dict[Kind, list[Kind]] = {}
        for kind in self.kinds:
            if kind.is_copy and not kind.row.starts:
                for needed in needed_on_own_rank(kind):
                    found.setdefault(needed, []).append(kind)
        return found

    @cached_property
    def awaited(self) -> dict[Pass, Pass]:
        """By pass, the pass on a lane that it waits for, which the rank has started. What the second half of a braid needs is
        waited for before the first."""
        started = {kind for kind in self.kinds if kind.row.starts_on_lane}
        waiting = {kind for kind in self.kinds if not (kind.is_copy or started.isdisjoint(needed_on_own_rank(kind)))}
        first = {second: first for first, second in self.braids()}
        found: dict[Pass, Pass] = {}
        for work in self.passes if waiting else ():
            if work.kind in waiting and (need := self.before(work)) and need.kind in started:
                found[first.get(work, work)] = need
        return found

    def before(self, work: Pass) -> Pass | None:
        """Passes that run before a pass on this rank, for the same microbatch and chunk."""
        kinds = needed_on_own_rank(work.kind)
        return self.first_of(kinds, work.microbatch, work.chunk) if kinds else None

    def first_before_its_need(self) -> tuple[Pass, Pass] | None:
        """The first pass that runs before what it needs of the same microbatch and chunk on this rank, and what that is."""
        own = {}
        for kind in self.kinds:
            needs = needed_on_own_rank(kind)
            own[kind] = tuple(each for each in needs if each in self.kinds) or needs[-1:]
        seen: set[tuple[Kind, int, int]] = set()
        for work in self.passes:
            kind, microbatch, chunk = work
            needed = own[kind]
            if needed:
                alone = len(needed) == 1
                kinds = needed_on_own_rank(kind)
                need = Pass(needed[0], microbatch, chunk) if alone else self.first_of(kinds, microbatch, chunk)
                if need not in seen:
                    return work, need
            seen.add(work)
        return None


_KIND = itemgetter(0)


class ScheduleError(ValueError):
    """A schedule, or what it was lowered to, breaks a rule; the message names the rank and the first pass that does."""


def _read_row(rank: int, row: list[Any]) -> tuple[Pass, ...]:
    with NamedErrors(f"rank {rank}:"):
        return tuple(Pass.parse(text) for text in row)


def _is_table(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(row, list) for row in value)
