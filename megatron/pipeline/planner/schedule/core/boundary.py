"""The boundary of iterations: what every rank does from its first complete gradient to its last gather of parameters.

A row of ``Schedule.boundary`` is a part of what its rank repeats in every iteration: the last passes of an iteration from the
first RS on, then the first passes of the next one up to the last OPT or AG, with RS, OPT and AG among them, as in

    RS0.1 W6.0 W7.0 RS0.0 OPT0.0 AG0.0 F0.0 OPT0.1 AG0.1

A rank computes in the order of its row. RS and AG run on a lane of their own, in their order there: their place is where the rank
starts them, once what it computes before them is over. An OPT waits for its RS, an AG for its OPT. What stands behind the first
pass of an iteration belongs to the boundary before that iteration; in the very first iteration there is nothing of it to do, and
after the very last it is all that is left to do.

A pass goes through the buckets of its chunk, and takes as long for each: a forward from bucket 0 on, which is of the chunk's
first layers, a backward up to bucket 0. So the first pass that uses a chunk's parameters waits for each AG only when it is there.
RS directly before the last pass that adds to its chunk's gradients begins within it, when its bucket is complete; AG directly
behind the first pass that uses its chunk begins with it, as gathers that a forward asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.pipeline.planner.schedule.core.kinds import Kind
from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.core.schedule import Schedule


class Turn(NamedTuple):
    """Passes that a rank repeats in every iteration: its own, with those of the boundaries at both ends, in their order."""

    passes: tuple[Pass, ...]

    @property
    def late(self) -> int:
        """Number of passes up to the last one that belongs to the boundary before this iteration: OPT and AG before their RS."""
        reduced, late = set[tuple[int, int]](), 0
        for slot, work in enumerate(self.passes, 1):
            if work.kind is Kind.RS:
                reduced.add(work[1:])
            elif work.kind.row.bucket and work[1:] not in reduced:
                late = slot
        return late

    @property
    def row(self) -> tuple[Pass, ...]:
        """The row of ``Schedule.boundary``."""
        late = self.late
        own = (slot for slot, work in enumerate(self.passes[late:], late) if work.kind.row.bucket)
        return self.passes[next(own, len(self.passes)) :] + self.passes[:late]


def turn(passes: tuple[Pass, ...], row: tuple[Pass, ...]) -> Turn | None:
    """A rank's turn: its passes of one iteration with its row of a boundary; None where the row does not fit these."""
    at = row.index(passes[0]) if passes and passes[0] in row else len(row)
    tail, late = row[:at], row[at:]
    ends, begins = without_buckets(tail), without_buckets(late)
    last = len(passes) - len(ends)
    if len(begins) > last or passes[: len(begins)] != begins or passes[last:] != ends:
        return None
    return Turn(late + passes[len(begins) : last] + tail)


def turns(schedule: Schedule) -> list[Turn]:
    """Every rank's turn, of a schedule whose boundary, if it has one, is known to fit (``rules.boundary``)."""
    found = [turn(*pair) for pair in zip(schedule.passes, schedule.boundary or ((),) * schedule.ranks, strict=True)]
    return [each for each in found if each is not None]


def with_turns(schedule: Schedule, made: Sequence[Turn]) -> Schedule:
    """The schedule whose ranks repeat these."""
    return replace(
        schedule, passes=tuple(without_buckets(each.passes) for each in made), boundary=tuple(each.row for each in made)
    )


def without_buckets(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    """Passes of an iteration alone."""
    return tuple(work for work in passes if not work.kind.row.bucket)


def buckets(row: Iterable[Pass]) -> Counter[int]:
    """By chunk, the number of buckets that a rank's row has of it."""
    return Counter(work.chunk for work in row if work.kind is Kind.RS)


def first_and_last(passes: Sequence[Pass]) -> tuple[dict[int, int], dict[int, int]]:
    """By chunk, the places of the first pass that uses its parameters and of the last one that adds to its gradients."""
    first = {work.chunk: slot for slot, work in reversed(list(enumerate(passes))) if work.kind.is_forward}
    return first, {work.chunk: slot for slot, work in enumerate(passes) if completes(work.kind)}


def within(passes: Sequence[Pass]) -> set[Pass]:
    """RS and AG of a turn that begin within the pass beside them: see above."""
    found = set[Pass]()
    first, last = first_and_last(passes)
    for kind, step, place in ((Kind.AG, 1, first), (Kind.RS, -1, last)):
        for chunk, slot in place.items():
            beside = slot + step
            while 0 <= beside < len(passes) and passes[beside].kind.row.bucket:
                found |= {passes[beside]} if passes[beside][::2] == (kind, chunk) else set()
                beside += step
    return found


def completes(kind: Kind) -> bool:
    """Tell whether a pass of a kind adds to the gradients of its chunk: the last of these fills its buckets."""
    return not (kind.is_forward or kind.row.lane or kind.row.bucket) and kind is not Kind.R
