"""When every pass runs and what it holds, given the costs: an event-driven replay of a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from megatron.pipeline.schedule.costs import Costs
from megatron.pipeline.schedule.passes import STAGE_KINDS, VOCABULARY_KINDS, Kind, Pass, Vocabulary
from megatron.pipeline.schedule.placement import Placement
from megatron.pipeline.schedule.schedule import MOST_WAITING, Schedule
from megatron.pipeline.schedule.timeline import Timed, Timeline

F, R, B, W, BW, S, T, IF, IB = Kind  # found once: looking up Kind.F takes longer than everything else that is done with a pass
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
    return _replay(schedule, None).runs


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run every rank's passes in order, each as soon as the rank is free and its inputs are there.

    A result reaches another rank one ``costs.hop`` after its pass ended, and its own rank at once. Times are in the unit
    of the costs, from 0; costs given as ``Fraction`` give exact times.

    Raises:
        ValueError: the costs are for another number of stages, or the schedule cannot finish (the stuck pass is named).
    """
    check_stages(schedule.placement, costs)
    replay = _replay(schedule, costs.sliced(schedule.splits))
    rows = zip(schedule.passes, replay.starts, replay.ends, strict=True)
    # tuple.__new__ is what Timed(work, start, end) calls, and saves a call in Python for each of some hundred thousand passes.
    return Timeline(tuple(tuple(map(tuple.__new__, repeat(Timed), zip(*row, strict=True))) for row in rows))


class _Replay(NamedTuple):
    """What happens when every rank runs its passes in order.

    Attributes:
        runs: (rank, its slots) that run without a wait for another rank, in an order in which they can run.
        starts, ends: of every pass, by rank and slot.
    """

    runs: list[tuple[int, range]]
    starts: list[list[float]]
    ends: list[list[float]]


def _replay(schedule: Schedule, costs: Costs | None) -> _Replay:
    """Run every pass as soon as it can; without costs nothing takes time.

    Raises:
        Stuck: a pass precedes what it needs on its own rank, or waits for one that waits for it.
    """
    for rank, passes in enumerate(schedule.passes):
        if (misplaced := first_before_its_need(passes)) is not None:
            raise Stuck(rank, misplaced[0], (rank, misplaced[1]))
    links, count = _links(schedule, costs)
    made_at: list[float | None] = [None] * count  # when every result was made
    for number in (*range(schedule.slices), *range(count - schedule.slices - MOST_WAITING, count - schedule.slices)):
        made_at[number] = 0
    parts: dict[int, list[float]] = {}  # when those parts were made of a result that every rank has a part in
    free: list[float] = [0] * schedule.ranks
    replay = _Replay([], [[] for _ in schedule.passes], [[] for _ in schedule.passes])
    blocked: dict[int, list[int]] = {}  # the ranks that wait for a result
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        passes, linked, starts, ends, now = schedule.passes[rank], links[rank], replay.starts[rank], replay.ends[rank], free[rank]
        first = len(ends)
        for slot in range(first, len(passes)):
            kind, microbatch, chunk = passes[slot]
            made, needed, hop, seconds, is_part = linked[chunk][kind]
            ready = made_at[needed + microbatch]
            if ready is None:
                blocked.setdefault(needed + microbatch, []).append(rank)
                break
            arrived = ready + hop
            start = arrived if arrived > now else now
            now = start + seconds
            starts.append(start)
            ends.append(now)
            if is_part:
                there = parts.setdefault(made + microbatch, [])
                there.append(now)
                if len(there) < schedule.ranks:
                    continue
                made_at[made + microbatch] = max(there)
            else:
                made_at[made + microbatch] = now
            if made + microbatch in blocked:
                runnable += blocked.pop(made + microbatch)
        free[rank] = now
        replay.runs.append((rank, range(first, len(ends))))
    for rank in itertools.chain(*blocked.values()):
        work = schedule.passes[rank][len(replay.ends[rank])]
        done = [set(passes[: len(ends)]) for passes, ends in zip(schedule.passes, replay.ends, strict=True)]
        raise Stuck(rank, work, next(need for need in schedule.predecessors(rank, work) if need[1] not in done[need[0]]))
    return replay


def delay(schedule: Schedule, costs: Costs, rank: int, work: Pass, other: int, need: Pass) -> float:
    """How long after ``need`` ended on another rank, or this one, it has arrived where ``work`` needs it.

    What all ranks have a part in takes a collective, and with one barrier the gradient two: S's parts have to be weighed against
    each other before they are summed.
    """
    if need.kind.is_of_vocabulary:
        return costs.exchange * (2 if need.kind is S and work.kind.sends_gradient else 1)
    if other == rank:
        return 0
    return costs.exchange if work.kind.is_of_vocabulary else costs.hop


class _Link(NamedTuple):
    """How the passes of one kind on one stage, or of the vocabulary on one rank, hang together with those elsewhere.

    What they make for each other has numbers, one after another for the microbatches: ``made + microbatch`` is made, and
    ``needed + microbatch`` is needed and arrives ``hop`` after it was made. Numbers from 0 are there from the start, for
    passes that need nothing from elsewhere, and the next ones nobody needs. The last ones are embeddings, for which there is
    room from the start for a few microbatches.
    """

    made: int
    needed: int
    hop: float
    seconds: float
    is_part: bool = False  # what is made is there once all ranks have made it


def _links(schedule: Schedule, costs: Costs | None) -> tuple[list[list[dict[Kind, _Link]]], int]:
    """The link of every kind, by rank and chunk; and how many numbers there are."""
    placement, slices, stages = schedule.placement, schedule.slices, schedule.placement.last_stage + 1
    nothing, nowhere = 0, slices
    outputs = [(2 + stage) * slices for stage in range(stages)]
    gradients = [(2 + stages + stage) * slices for stage in range(stages)]
    logits, weights, room = ((2 + 2 * stages + i) * slices for i in range(3))
    embedded = room + MOST_WAITING  # before the first of them there is room
    spread = schedule.vocabulary
    exchange = costs.exchange if costs is not None else 0

    def link(stage: int, kind: Kind) -> _Link:
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
        return _Link(made, needed, 0 if near else hop, seconds)

    def shard(rank: int, kind: Kind) -> _Link:
        seconds = costs.vocabulary.seconds(kind) if costs is not None else 0
        if kind is IF:
            return _Link(embedded, room, exchange, seconds, is_part=True)
        if kind is T:
            return _Link(weights, logits, exchange, seconds, is_part=True)
        end = placement.last_stage if kind is S else 0
        hop = 0 if placement.home(end)[0] == rank else exchange
        if kind is S:
            return _Link(logits, outputs[end], hop, seconds, is_part=True)
        return _Link(nowhere, gradients[end], hop, seconds)

    own = [{kind: shard(rank, kind) for kind in VOCABULARY_KINDS} if spread else {} for rank in range(placement.ranks)]
    table = [
        [{kind: link(stage, kind) for kind in STAGE_KINDS} | own[rank] for stage in row]
        for rank, row in enumerate(placement.stages)
    ]
    return table, embedded + slices


def first_before_its_need(passes: Sequence[Pass]) -> tuple[Pass, Pass] | None:
    """The first pass of a rank that runs before what it needs of the same microbatch and chunk, and what that is.

    R needs F, B and BW need R if there is one and F otherwise, W needs B, and T needs S.
    """
    again = {(microbatch, chunk) for kind, microbatch, chunk in passes if kind is R}
    seen: set[tuple[Kind, int, int]] = set()
    for work in passes:
        kind, microbatch, chunk = work
        need = _NEEDS.get(kind)
        if need is not None:
            if again and need is F and kind is not R and (microbatch, chunk) in again:
                need = R
            if (need, microbatch, chunk) not in seen:
                return work, Pass(need, microbatch, chunk)
        seen.add(work)
    return None


_NEEDS = {R: F, B: F, BW: F, W: B, T: S}


def activation_peaks(schedule: Schedule, costs: Costs) -> list[float]:
    """The most activation memory each rank holds at once, in the costs' unit.

    F allocates when it starts, B, W and BW free when they end. A rank runs its passes one after another, so the peak
    depends on their order alone.
    """
    return [max(itertools.accumulate(changes, initial=0)) for changes in activation_changes(schedule, costs)]


def activation_profile(schedule: Schedule, timeline: Timeline, costs: Costs) -> list[list[tuple[float, float]]]:
    """For each rank, the moments at which its activation memory changes and what it holds from then on, in the costs' unit."""
    profile: list[list[tuple[float, float]]] = []
    for passes, changes in zip(timeline.ranks, activation_changes(schedule, costs), strict=True):
        held: float = 0
        steps: list[tuple[float, float]] = []
        for (_, start, end), change in zip(passes, changes, strict=True):
            held += change
            steps.append((start if change > 0 else end, held))
        profile.append(steps)
    return profile


def activation_changes(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """For each rank, what every pass allocates (positive) or frees (negative), in the costs' unit."""
    check_stages(schedule.placement, costs)
    stages = costs.sliced(schedule.splits).stages
    table = {
        (stage, kind, recomputed): cost.allocated(kind, recomputed)
        for stage, cost in enumerate(stages)
        for kind in STAGE_KINDS
        for recomputed in (False, True)
    }
    if schedule.vocabulary:
        for kind, stage in itertools.product(VOCABULARY_KINDS, range(len(stages))):
            table[stage, kind, False] = table[stage, kind, True] = costs.vocabulary.allocated(kind)
    changes: list[list[float]] = []
    for rank, passes in enumerate(schedule.passes):
        mine = schedule.placement.stages[rank]
        recomputed = {(work.microbatch, work.chunk) for work in passes if work.kind is R}
        changes.append(
            [table[mine[work.chunk], work.kind, (work.microbatch, work.chunk) in recomputed] for work in passes]
            if recomputed
            else [table[mine[work.chunk], work.kind, False] for work in passes]
        )
    return changes


def check_stages(placement: Placement, costs: Costs) -> None:
    """Raises:
    ValueError: the costs are for another number of stages than the placement has.
    """
    stages = placement.ranks * placement.chunks
    if len(costs.stages) != stages:
        raise ValueError(
            f"costs of {len(costs.stages)} stages for a placement of {stages} ({placement.ranks} ranks with "
            f"{placement.chunks} chunks each); give one StageCosts per stage"
        )
