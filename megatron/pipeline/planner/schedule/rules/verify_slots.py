"""The rule of slots, as code: none has two tenants, and there are no more than there have to be."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.lower.program import Compute, Program, describe
from megatron.pipeline.planner.schedule.lower.slots import Slots, tenant


def verify_slots(schedule: Schedule, programs: Sequence[Program], slots: Sequence[Slots], posted: bool = False) -> None:
    """Check the slots of all ranks: see ``slots_of``, and there for ``posted``.

    Raises:
        ScheduleError: names the rank, and the first operation that finds another microbatch in its slot; or the chunk that has
            more slots than tenants at a time.
    """
    for rank, (program, stages, rows) in enumerate(zip(programs, schedule.placement.stages, slots, strict=True)):
        if [len(row) for row in rows] != [schedule.slices] * len(stages):
            raise ScheduleError(f"rank {rank}: slots of {[len(row) for row in rows]} microbatches; a slot for each of its chunks")
        found = [(tenant(operation, stages), operation) for operation in program]
        uses = [(who, one) for who, one in found if who is not None and (posted or isinstance(one, Compute))]
        left = {who: place for place, (who, _) in enumerate(uses)}  # the last use of each
        tenants: dict[tuple[int, int], tuple[int, int]] = {}
        here, most = [0 for _ in stages], [0 for _ in stages]
        for place, (who, operation) in enumerate(uses):
            chunk, microbatch = who
            slot = chunk, rows[chunk][microbatch]
            if slot not in tenants:
                tenants[slot] = who
                here[chunk] += 1
                most[chunk] = max(most[chunk], here[chunk])
            elif tenants[slot] != who:
                raise ScheduleError(
                    f"rank {rank}: {describe(operation)} is in slot {slot[1]} of chunk {chunk}, which microbatch "
                    f"{tenants[slot][1]} has until its weight gradients are there and its gradient is sent; give it another slot"
                )
            if left[who] == place:
                del tenants[slot]
                here[chunk] -= 1
        for chunk, row in enumerate(rows):
            if len(set(row)) > most[chunk]:
                raise ScheduleError(
                    f"rank {rank}: chunk {chunk} has {len(set(row))} slots for {most[chunk]} microbatches at a time"
                )
