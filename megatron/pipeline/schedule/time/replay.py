"""An event-driven replay of a schedule: rows of passes, each of which runs once its row is free and its inputs are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import COPY_KINDS, STAGE_KINDS, VOCABULARY_KINDS, Kind, Pass, Vocabulary
from megatron.pipeline.schedule.core.schedule import MOST_WAITING, Schedule

# Found once: looking up Kind.F takes longer than everything else that is done with a pass.
F, R, B, W, BW, S, T, IF, IB, D2H, H2D = Kind
_ELSEWHERE = -1  # in place of a stage: on all ranks


class Stuck(ValueError):
    """A schedule cannot finish: ``rank`` can never start ``work``, because what it needs is never made before."""

    def __init__(self, rank: int, work: Pass, needed: tuple[int, Pass]) -> None:
        super().__init__(
            f"rank {rank} is stuck at {work}: it needs {needed[1]} of rank {needed[0]}, which cannot run before it; "
            "move one of the two, or add the missing pass"
        )
        self.rank, self.work = rank, work


def dependency_order(schedule: Schedule) -> list[tuple[int, range]]:
    """All passes, as runs of (rank, slots): each pass after those it needs and after those that precede it on its rank.

    Raises:
        Stuck: some passes can never run.
    """
    return replay(schedule, rows_of(schedule, None)).runs


class Rows(NamedTuple):
    """What is replayed: rows of passes, of ranks and of their copy lanes.

    Attributes:
        passes: of every row.
        links: by row, chunk and kind.
        size: how many numbers there are for what passes make for each other.
    """

    passes: Sequence[Sequence[Pass]]
    links: list[list[dict[Kind, Link]]]
    size: int


class Replay(NamedTuple):
    """What happens when every rank runs its passes in order.

    Attributes:
        runs: (row, its slots) that run without a wait for another one, in an order in which they can run.
        starts, ends: of every pass, by row and slot.
    """

    runs: list[tuple[int, range]]
    starts: list[list[float]]
    ends: list[list[float]]


def rows_of(schedule: Schedule, costs: Costs | None) -> Rows:
    """Those of the ranks; without costs nothing takes time, nor do copies."""
    return Rows(schedule.passes, *_links(schedule, costs))


def replay(
    schedule: Schedule,
    rows: Rows,
    seconds_of: Sequence[Sequence[Any] | None] | None = None,
    later: Callable[[Any, Any], Any] | None = None,
) -> Replay:
    """Run every row's passes in their order, each as soon as it can.

    Times follow from the order alone, so rows need not take turns: each runs until it needs a result that does not exist yet.

    Args:
        seconds_of: durations by slot, of the rows whose passes do not take what their links say.
        later: the later of two times, element by element, if times are arrays of draws; None if they are numbers.

    Raises:
        Stuck: a pass precedes what it needs on its own rank, or waits for one that waits for it.
    """
    for rank, own in enumerate(schedule.passes):
        if (misplaced := first_before_its_need(own)) is not None:
            raise Stuck(rank, misplaced[0], (rank, misplaced[1]))
    made_at = results_at_start(schedule, rows)
    parts: dict[int, list[float]] = {}  # of results that every rank has a part in: when the parts made so far were made
    free: list[float] = [0] * len(rows.passes)
    run = Replay([], [[] for _ in rows.passes], [[] for _ in rows.passes])
    blocked: dict[int, list[int]] = {}  # the rows that wait for a result
    runnable = list(range(len(rows.passes)))
    while runnable:
        row = runnable.pop()
        passes, linked, starts, ends, now = rows.passes[row], rows.links[row], run.starts[row], run.ends[row], free[row]
        first, own_seconds = len(ends), seconds_of[row] if seconds_of else None
        for slot in range(first, len(passes)):
            kind, microbatch, chunk = passes[slot]
            made, needed, hop, seconds, is_part = linked[chunk][kind]
            ready = made_at[needed + microbatch]
            if ready is None:
                blocked.setdefault(needed + microbatch, []).append(row)
                break
            if own_seconds:
                seconds = own_seconds[slot]
            arrived = ready + hop
            start = later(arrived, now) if later else arrived if arrived > now else now
            now = start + seconds
            starts.append(start)
            ends.append(now)
            if is_part:
                there = parts.setdefault(made + microbatch, [])
                there.append(now)
                if len(there) < schedule.ranks:
                    continue
                made_at[made + microbatch] = reduce(later or max, there)
            else:
                made_at[made + microbatch] = now
            if made + microbatch in blocked:
                runnable += blocked.pop(made + microbatch)
        free[row] = now
        run.runs.append((row, range(first, len(ends))))
    if blocked:
        raise _first_stuck(schedule, run, blocked)
    return run


def results_at_start(schedule: Schedule, rows: Rows) -> list[Any]:
    """When every result was made, by its number: None for all but those that exist from the start."""
    made_at: list[Any] = [None] * rows.size
    room = Numbers(schedule).room
    for number in (*range(schedule.slices), *range(room, room + MOST_WAITING)):
        made_at[number] = 0
    return made_at


def _first_stuck(schedule: Schedule, run: Replay, blocked: Mapping[int, Sequence[int]]) -> Stuck:
    if len(run.ends) > schedule.ranks:
        dependency_order(schedule)  # without lanes it gets stuck at the same pass, and says so
    rank = next(iter(chain(*blocked.values())))
    work = schedule.passes[rank][len(run.ends[rank])]
    done = [set(passes[: len(ends)]) for passes, ends in zip(schedule.passes, run.ends, strict=True)]
    return Stuck(rank, work, next(need for need in schedule.predecessors(rank, work) if need[1] not in done[need[0]]))


class Link(NamedTuple):
    """How the passes of one kind on one stage, or of the vocabulary on one rank, hang together with those elsewhere.

    What they make for each other has numbers, one after another for the microbatches: ``made + microbatch`` is made, and
    ``needed + microbatch`` is needed and arrives ``hop`` after it was made. Numbers from 0 are there from the start, for
    passes that need nothing from elsewhere, and the next ones nobody needs. For a few embeddings there is room from the start.
    """

    made: int
    needed: int
    hop: float
    seconds: float
    is_part: bool = False  # what is made is there once all ranks have made it


class Numbers:
    """Where the numbers of what passes make for each other begin, one after another for the microbatches; by stage in lists."""

    def __init__(self, schedule: Schedule) -> None:
        slices, stages = schedule.slices, schedule.placement.last_stage + 1
        self.nothing, self.nowhere = 0, slices
        self.outputs = [(2 + stage) * slices for stage in range(stages)]
        self.gradients = [(2 + stages + stage) * slices for stage in range(stages)]
        self.logits, self.weights, self.room = ((2 + 2 * stages + i) * slices for i in range(3))
        self.embedded = self.room + MOST_WAITING  # before the first of them there is room
        self.count = self.embedded + slices
        # With copy lanes: what has reached the host, what may be copied back, and what is back.
        self.away, self.called, self.back = (
            [self.count + (turn * stages + stage) * slices for stage in range(stages)] for turn in range(3)
        )
        self.count_with_lanes = self.count + 3 * stages * slices


def _links(schedule: Schedule, costs: Costs | None) -> tuple[list[list[dict[Kind, Link]]], int]:
    """The link of every kind, by rank and chunk; and how many numbers there are."""
    placement, numbers = schedule.placement, Numbers(schedule)
    nothing, nowhere, outputs, gradients = numbers.nothing, numbers.nowhere, numbers.outputs, numbers.gradients
    logits, weights, room, embedded = numbers.logits, numbers.weights, numbers.room, numbers.embedded
    spread = schedule.vocabulary
    exchange = costs.exchange if costs is not None else 0

    def link(stage: int, kind: Kind) -> Link:
        made, needed, neighbour = nowhere, nothing, stage
        hop = costs.hop if costs is not None else 0
        if kind is F:
            made = outputs[stage]
            if not placement.is_first(stage):
                neighbour, needed = stage - 1, outputs[stage - 1]
            elif spread:
                neighbour, needed, hop = _ELSEWHERE, embedded, exchange
        elif kind.sends_gradient:
            made = gradients[stage]
            if not placement.is_last(stage):
                neighbour, needed = stage + 1, gradients[stage + 1]
            elif spread is Vocabulary.ONE_BARRIER:  # what S has made has to be weighed against all others', and then summed
                neighbour, needed, hop = _ELSEWHERE, logits, 2 * exchange
            elif spread:
                neighbour, needed, hop = _ELSEWHERE, weights, exchange
        seconds = costs.stages[stage].seconds(kind) if costs is not None else 0
        # What its own rank makes precedes the pass on it: only what comes from elsewhere can be late.
        near = neighbour != _ELSEWHERE and placement.home(neighbour)[0] == placement.home(stage)[0]
        return Link(made, needed, 0 if near else hop, seconds)

    def shard(rank: int, kind: Kind) -> Link:
        seconds = costs.vocabulary.seconds(kind) if costs is not None else 0
        if kind is IF:
            return Link(embedded, room, exchange, seconds, is_part=True)
        if kind is T:
            return Link(weights, logits, exchange, seconds, is_part=True)
        end = placement.last_stage if kind is S else 0
        hop = 0 if placement.home(end)[0] == rank else exchange
        if kind is S:
            return Link(logits, outputs[end], hop, seconds, is_part=True)
        return Link(nowhere, gradients[end], hop, seconds)

    copies = {kind: Link(nowhere, nothing, 0, 0) for kind in COPY_KINDS}  # unless there are lanes for them
    own = [{kind: shard(rank, kind) for kind in VOCABULARY_KINDS} if spread else {} for rank in range(placement.ranks)]
    table = [
        [{kind: link(stage, kind) for kind in STAGE_KINDS} | own[rank] | copies for stage in row]
        for rank, row in enumerate(placement.stages)
    ]
    return table, numbers.count


def first_before_its_need(passes: Sequence[Pass]) -> tuple[Pass, Pass] | None:
    """The first pass of a rank that runs before what it needs of the same microbatch and chunk, and what that is.

    R needs F, B and BW need R if there is one and F otherwise, W needs B, and T needs S. D2H needs F, H2D needs D2H, and where
    there is one it is what R needs, or B and BW without R.
    """
    again = {(microbatch, chunk) for kind, microbatch, chunk in passes if kind is R}
    away = {(microbatch, chunk) for kind, microbatch, chunk in passes if kind is H2D}
    seen: set[tuple[Kind, int, int]] = set()
    for work in passes:
        kind, microbatch, chunk = work
        need = _NEEDS.get(kind)
        if need is not None:
            if again and need is F and kind in BACKWARDS and (microbatch, chunk) in again:
                need = R
            elif away and need is F and kind is not D2H and (microbatch, chunk) in away:
                need = H2D
            if (need, microbatch, chunk) not in seen:
                return work, Pass(need, microbatch, chunk)
        seen.add(work)
    return None


_NEEDS = {R: F, B: F, BW: F, W: B, T: S, D2H: F, H2D: D2H}
BACKWARDS = (B, BW)
