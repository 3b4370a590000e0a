"""The rules of a planned boundary, as code: what every row of ``Schedule.boundary`` must obey."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron.pipeline.planner.schedule.core.boundary import Turn, buckets, first_and_last, turn, within, without_buckets
from megatron.pipeline.planner.schedule.core.kinds import BUCKET_KINDS
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError


def verify_boundary(schedule: Schedule, waits_for_norm: bool = False) -> None:
    """Check a schedule's boundary, if it has one, against every rule below.

    Args:
        waits_for_norm: whether the norm of all gradients is known before the first step: training without post-validation.

    Raises:
        ScheduleError: a rule is broken; the message names the rank and the first pass that breaks it.
    """
    if not schedule.boundary:
        return
    if len(schedule.boundary) != schedule.ranks:
        raise ScheduleError(
            f"a boundary of {len(schedule.boundary)} ranks for a placement of {schedule.ranks}; give one row per rank"
        )
    for rank, (passes, row) in enumerate(zip(schedule.passes, schedule.boundary, strict=True)):
        every_bucket_is_there_once(rank, row, schedule.placement.chunks)
        if (repeated := turn(passes, row)) is None:
            raise ScheduleError(
                f"rank {rank}: the boundary is of other passes than the iteration; beside RS, OPT and AG it must have the "
                f"iteration's last passes, and then its first ones, and it has {' '.join(map(str, without_buckets(row)))}"
            )
        passes_of_a_bucket_are_in_order(rank, row)
        chunks_are_complete_and_there(rank, repeated)
        if waits_for_norm:
            steps_follow_all_reductions(rank, row)


def every_bucket_is_there_once(rank: int, row: Sequence[Pass], chunks: int) -> None:
    """A rank reduces, steps and gathers every bucket of each of its chunks once; buckets of a chunk count from 0."""
    counts, there = buckets(row), set(row)
    for work, times in Counter(row).items():
        if times > 1:
            raise ScheduleError(f"rank {rank}: {work} is in the boundary {times} times; remove all but one")
        if work.kind.row.bucket and not (work.chunk < chunks and work.microbatch < max(1, counts[work.chunk])):
            raise ScheduleError(
                f"rank {rank}: {work} is of an unknown bucket; chunks are 0..{chunks - 1}, and the buckets of one count from 0"
            )
    for chunk in range(chunks):
        for kind in BUCKET_KINDS:
            for bucket in range(max(1, counts[chunk])):
                if (work := Pass(kind, bucket, chunk)) not in there:
                    raise ScheduleError(f"rank {rank}: {work} is missing in the boundary; add it")


def passes_of_a_bucket_are_in_order(rank: int, row: Sequence[Pass]) -> None:
    """A bucket is reduced, then stepped, then gathered. Then no pass on the lane waits for one behind it there."""
    seen: set[Pass] = set()
    for work in row:
        before = work._replace(kind={Kind.OPT: Kind.RS, Kind.AG: Kind.OPT}.get(work.kind, work.kind))
        if work.kind.row.bucket and before != work and before not in seen:
            raise ScheduleError(f"rank {rank}: {work} runs before {before}; it must run after it")
        seen.add(work)


def chunks_are_complete_and_there(rank: int, repeated: Turn) -> None:
    """RS follows the last pass that adds to its chunk's gradients, in the same iteration, and AG precedes the first pass that
    uses its chunk's parameters; or they stand beside that pass, and begin within it."""
    passes, late = repeated.passes, repeated.late
    (first, last), beside = first_and_last(passes), within(passes)
    for slot, work in enumerate(passes):
        if work in beside:
            continue
        if work.kind is Kind.RS and slot < last.get(work.chunk, -1):
            raise ScheduleError(
                f"rank {rank}: {work} runs before {passes[last[work.chunk]]}, which adds to its gradients; it must run "
                "directly before the last one that does, or after it"
            )
        if work.kind is Kind.AG and slot < late and slot > first.get(work.chunk, slot):
            raise ScheduleError(
                f"rank {rank}: {work} runs after {passes[first[work.chunk]]}, which uses its parameters; it must run "
                "before the first one that does, or directly after it"
            )


def steps_follow_all_reductions(rank: int, row: Sequence[Pass]) -> None:
    """A rank starts all RS before any OPT and any AG where the norm is known first: the norm waits for every RS of every rank,
    each OPT for the norm, and an RS behind a step, or behind a gather on the lane, would wait for the norm in turn."""
    last = max((slot for slot, work in enumerate(row) if work.kind is Kind.RS), default=-1)
    for work in row[:last]:
        if work.kind.row.bucket and work.kind is not Kind.RS:
            raise ScheduleError(
                f"rank {rank}: {work} runs before {row[last]}, and waits for the norm of all gradients; it must run after it, or "
                "the training needs --post-validation"
            )
