"""The specification of a schedule, as code: every rule that a schedule must obey, from a family or from a file.

``verify`` checks a schedule; ``verify_programs`` (in ``verify_programs.py``) checks what it was lowered to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from megatron.pipeline.planner.schedule.core.costs import Costs, uniform
from megatron.pipeline.planner.schedule.core.passes import COPY_KINDS, Kind, Pass
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, per_rank
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.rules.boundary import verify_boundary
from megatron.pipeline.planner.schedule.rules.verify_programs import verify_programs
from megatron.pipeline.planner.schedule.time.replay import Stuck, dependency_order
from megatron.pipeline.planner.schedule.time.simulate import activation_changes

F = Kind.F  # found once: looking it up takes longer than everything else that is done with a pass

__all__ = ["ScheduleError", "per_rank", "rounded_up", "verify", "verify_programs"]


class LimitExceeded(ScheduleError, LimitTooLow):
    """A schedule holds more than its limit."""


def verify(
    schedule: Schedule,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
    forward_only: bool = False,
    waits_for_norm: bool = False,
) -> None:
    """Check a schedule against every rule below.

    Args:
        schedule: what to check.
        costs: for the memory limit; by default every microbatch takes 1 on a rank, held until W.
        memory_limit: the most activation memory a rank may hold, in the costs' unit; one number, or one per rank.
        forward_only: the schedule is for evaluation, so that it has every F (S and IF) and nothing else.
        waits_for_norm: see ``verify_boundary``.

    Raises:
        ScheduleError: a rule is broken; the message names the rank and the first pass that breaks it.
    """
    verify_passes(schedule, forward_only)
    passes_of_a_chunk_are_in_microbatch_order(schedule)
    dependencies_can_be_met(schedule)
    verify_boundary(schedule, waits_for_norm)
    if memory_limit is not None and (exceeded := excess(schedule, costs or uniform(schedule.placement), memory_limit)):
        raise exceeded


def verify_passes(schedule: Schedule, forward_only: bool = False) -> None:
    """Check that all passes are there, once, and in order on their own rank: what any runtime needs.

    Raises:
        ScheduleError: a rule is broken; the message names the rank and the first pass that breaks it.
    """
    every_pass_is_known(schedule)
    no_pass_is_repeated(schedule)
    every_pass_is_there(schedule, forward_only)
    every_copy_has_its_other_half(schedule)
    passes_of_a_microbatch_are_in_order(schedule)
    every_braid_has_its_forward(schedule)


def every_pass_is_known(schedule: Schedule) -> None:
    """Every rank has its row, and every pass is of a microbatch and a chunk that exist."""
    if len(schedule.passes) != schedule.ranks:
        raise ScheduleError(f"passes of {len(schedule.passes)} ranks for a placement of {schedule.ranks}; give one row per rank")
    if unknown := sorted(schedule.shielded - {*range(schedule.placement.depth)}):
        raise ScheduleError(f"shielded has stage {unknown[0]}; the placement has stages 0..{schedule.placement.last_stage}")
    slices, chunks = schedule.slices, schedule.placement.chunks
    for rank, passes in enumerate(schedule.passes):
        for work in passes:
            kind, microbatch, chunk = work
            if kind.row.bucket:
                raise ScheduleError(f'rank {rank}: {work} runs between two iterations; it belongs into "boundary"')
            if not 0 <= microbatch < slices:
                raise ScheduleError(f"rank {rank}: {work} is of an unknown microbatch; they are 0..{slices - 1}")
            if kind.is_of_vocabulary and not schedule.vocabulary:
                raise ScheduleError(f"rank {rank}: {work} in a schedule whose vocabulary is not spread; remove it, or say how")
            if kind.is_of_vocabulary and chunk:
                raise ScheduleError(f"rank {rank}: {work} is of chunk {chunk}; passes of the vocabulary have chunk 0")
            if not 0 <= chunk < chunks:
                raise ScheduleError(f"rank {rank}: {work} is of an unknown chunk; they are 0..{chunks - 1}")


def no_pass_is_repeated(schedule: Schedule) -> None:
    """No pass runs twice, and no backward runs both fused and split."""
    for rank, row in enumerate(schedule.rows):
        seen: set[Pass] = set()
        for work in row.passes:
            if work in seen:
                raise ScheduleError(f"rank {rank}: {work} runs twice; remove one")
            seen.add(work)
        for whole in row.kinds:
            for work in () if row.kinds.isdisjoint(whole.row.replaces) else row.passes:
                if work.kind in whole.row.replaces and row.has(whole, work):
                    raise ScheduleError(
                        f"rank {rank}: {work} runs again what {Pass(whole, *work[1:3])} does; keep either {whole}, or "
                        f"{' and '.join(whole.row.replaces)}"
                    )


def every_pass_is_there(schedule: Schedule, forward_only: bool) -> None:
    """Every rank runs F, and B and W or BW, of every microbatch (of every slice of it) on every chunk; where the vocabulary is
    spread, it also runs IF, S, T and IB of every microbatch. In an evaluation only forwards run: F, IF and S."""
    required = [kind for kind in Kind if not kind.row.optional and (kind.is_forward or not forward_only)]
    for rank, row in enumerate(schedule.rows):
        if forward_only and not all(kind.is_forward for kind in row.kinds):
            work = next(work for work in row.passes if not work.kind.is_forward)
            raise ScheduleError(f"rank {rank}: {work} does not belong to a schedule of forwards only; remove it")
        for kind in required:
            if kind.row.shard and not schedule.vocabulary:
                continue
            instead = [other for other in row.kinds if kind in other.row.replaces]
            for microbatch, chunk in _items(schedule, kind):
                present = (kind, microbatch, chunk) in row.all
                if not present and not any((other, microbatch, chunk) in row.all for other in instead):
                    raise _missing(rank, kind, microbatch, chunk)


def every_copy_has_its_other_half(schedule: Schedule) -> None:
    """Require that a rank copies back, once each, what it copies to host memory."""
    for rank, row in enumerate(schedule.rows if schedule.has_copies else ()):
        for work in row.passes:
            for kind in COPY_KINDS if work.kind.is_copy else ():
                if not row.has(kind, work):
                    raise _missing(rank, kind, *work[1:3])


def passes_of_a_microbatch_are_in_order(schedule: Schedule) -> None:
    """On its rank, F runs before B or BW of the same microbatch and chunk, R (if there is one) between them, B before W, and S
    before T. Where there are copies D2H follows F, H2D follows D2H, and R, or B or BW without one, follows H2D."""
    for rank, row in enumerate(schedule.rows):
        if (misplaced := row.first_before_its_need()) is not None:
            work, needed = misplaced
            raise ScheduleError(f"rank {rank}: {work} runs before {needed}; it must run after it")


def every_braid_has_its_forward(schedule: Schedule) -> None:
    """FB and FBW run as one with the F directly before them on their rank, which is of another microbatch or chunk."""
    for rank, row in enumerate(schedule.rows if any(row.is_braided for row in schedule.rows) else ()):
        for before, work in itertools.pairwise((None, *row.passes)):
            if not (work and work.kind.row.braided):
                continue
            if before is None or before.kind is not F or before[1:3] == work[1:3]:
                found = "nothing" if before is None else str(before)
                raise ScheduleError(
                    f"rank {rank}: {work} is braided with the pass before it, and that is {found}; put an F of another "
                    f"microbatch or chunk there, or make it {work.kind.row.braided}"
                )
            if schedule.splits > 1:
                raise ScheduleError(f"rank {rank}: {work} is braided in a schedule of slices; make it {work.kind.row.braided}")


def passes_of_a_chunk_are_in_microbatch_order(schedule: Schedule) -> None:
    """On one chunk, F run in microbatch order, R do, B and BW do, and W and BW do; on a rank, IF, S, T and IB do. Slices of one
    microbatch, cut along the sequence, run F in their order and the rest in reverse, since later ones attend to earlier ones.

    Data iterators hand out batches in the order of the forwards, on every stage that needs data. Sums of floats depend on
    their order, and DDP counts on the last microbatch to finish the gradients of a chunk.
    """
    splits = schedule.splits
    for rank, row in enumerate(schedule.rows):
        lines = {kind: kind.row.in_order for kind in row.kinds}
        last: dict[tuple[str, int], tuple[int, Pass]] = {}
        for work in row.passes:
            kind, place, chunk = work
            if splits > 1 and kind is not F:
                place += splits - 1 - 2 * (place % splits)
            for kinds in lines[kind]:
                before, other = last.get((kinds, chunk), (-1, work))
                if place < before:
                    whole = "order" if splits == 1 or kind is F else "order, and the slices of one microbatch must be in reverse"
                    raise ScheduleError(
                        f"rank {rank}: {work} runs after {other}; {kinds} of one chunk must be in microbatch {whole}"
                    )
                last[kinds, chunk] = place, work


def dependencies_can_be_met(schedule: Schedule) -> None:
    """No pass waits, over any number of ranks, for a pass that waits for it."""
    try:
        dependency_order(schedule)
    except Stuck as stuck:
        raise ScheduleError(str(stuck)) from None


def excess(schedule: Schedule, costs: Costs, memory_limit: float | Sequence[float]) -> LimitExceeded | None:
    """Refusal of a schedule whose ranks do not all hold at most their limits of activation memory, in the costs' unit."""
    limits = per_rank(memory_limit, schedule.ranks)
    levels = [list(itertools.accumulate(changes)) for changes in activation_changes(schedule, costs)]
    for rank, (limit, held) in enumerate(zip(limits, levels, strict=True)):
        limit_with_slack = limit * (1 + SLACK)
        if max(held, default=0) > limit_with_slack:
            slot = next(slot for slot, level in enumerate(held) if level > limit_with_slack)
            peaks = [max(held, default=0) for held in levels]
            fullest = max(range(schedule.ranks), key=peaks.__getitem__)
            more = f", and {rounded_up(peaks[fullest])} on rank {fullest}" if peaks[fullest] > peaks[rank] * (1 + SLACK) else ""
            return LimitExceeded(
                f"rank {rank}: {schedule.passes[rank][slot]} brings the activation memory of {schedule.name} to "
                f"{held[slot]:g}, above the limit of {limit:g}; this schedule needs {rounded_up(peaks[rank])} there{more}: raise "
                f"the limit to {rounded_up(peaks[fullest])}, or take a schedule that holds less",
                peaks[fullest],
            )
    return None


def rounded_up(amount: float) -> str:
    """An amount of memory with six digits, never less than it is: a limit that someone takes from a message suffices."""
    text = f"{amount:g}"
    if float(text) * (1 + SLACK) >= amount:
        return text
    return f"{amount + 10.0 ** (math.floor(math.log10(amount)) - 5):g}"


def _items(schedule: Schedule, kind: Kind) -> Iterator[tuple[int, int]]:
    """Every (microbatch, chunk) of a kind on any rank, one by one: a file may claim more microbatches than fit into a list."""
    chunks = 1 if kind.row.shard else schedule.placement.chunks
    return ((m, c) for c in range(chunks) for m in range(schedule.slices))


def _missing(rank: int, kind: Kind, microbatch: int, chunk: int) -> ScheduleError:
    return ScheduleError(f"rank {rank}: {Pass(kind, microbatch, chunk)} is missing; add it")
