"""Slots: which microbatches of a chunk use the same memory one after another.

A microbatch is the tenant of a slot of its chunk from its F until W or BW has run: a split backward needs the inputs and the
output gradients of its linears until W, so what a slot that is given away at B had of them is lost. A slot that has buffers of
messages, too, is its own from the moment the activation's receive is posted until the gradient of its input has been sent.

A send may still be under way when the next tenant comes; who writes there waits for it. The slot that has been free the longest
is taken, which leaves it the most time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron.pipeline.planner.schedule.core.kinds import Flow
from megatron.pipeline.planner.schedule.lower.program import Compute, Operation, Program, Receive, Send

__all__ = ["Slots", "slots_of", "tenant"]

Slots = tuple[tuple[int, ...], ...]  # for every chunk of a rank, the slot of every microbatch


def slots_of(program: Program, stages: Sequence[int], posted: bool = False) -> Slots:
    """Slots of a rank's microbatches: on every chunk as many as it has tenants at a time.

    Args:
        stages: the stage of each chunk of the rank.
        posted: slots have the buffers of messages, too.
    """
    first: dict[tuple[int, int], int] = {}
    last: dict[tuple[int, int], int] = {}
    for place, operation in enumerate(program):
        if (who := tenant(operation, stages)) is not None and (posted or isinstance(operation, Compute)):
            first.setdefault(who, place)
            last[who] = place
    coming, leaving = ({place: who for who, place in ends.items()} for ends in (first, last))
    found: list[dict[int, int]] = [{} for _ in stages]
    counts = [0 for _ in stages]
    free: list[deque[int]] = [deque() for _ in stages]
    for place in sorted(coming.keys() | leaving.keys()):
        if place in coming:
            chunk, microbatch = coming[place]
            if not free[chunk]:
                free[chunk].append(counts[chunk])
                counts[chunk] += 1
            found[chunk][microbatch] = free[chunk].popleft()
        if place in leaving:
            chunk, microbatch = leaving[place]
            free[chunk].append(found[chunk][microbatch])
    return tuple(tuple(slot for _, slot in sorted(row.items())) for row in found)


def tenant(operation: Operation, stages: Sequence[int]) -> tuple[int, int] | None:
    """The (chunk, microbatch) whose slot an operation reads or writes; None where it is of no stage."""
    match operation:
        case Compute(work) if not work.kind.is_of_vocabulary:
            return work.chunk, work.microbatch
        case Receive(message, _):
            return stages.index(message.stage + (1 if message.flow is Flow.ACTIVATION else -1)), message.microbatch
        case Send(message, _):
            return stages.index(message.stage), message.microbatch
        case _:
            return None
