"""The records of one iteration over the ranks of a pipeline, gathered while the next one runs: no rank waits for another.

Every rank knows every other's program, and so which passes and messages a record can be about and how long one is at most: it
is sent as numbers alone, all ranks' in one all-gather that is waited for when the report is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from megatron.pipeline.distributed.device import side_stream, this_device
from megatron.pipeline.monitor.recorder import Record, Waited
from megatron.pipeline.planner import Kind, Pass, Placement, Planned, Schedule, Timed, Timeline, every_batch, ops

_NONE = -1.0  # in place of a message: no more waits


@dataclass(frozen=True)
class Report:
    """One iteration of one pipeline, as its ranks recorded it.

    Attributes:
        ranks: their records.
        schedule: that they ran.
        loads: of its microbatches, where it was planned for them.
    """

    ranks: tuple[Record, ...]
    schedule: Schedule
    loads: tuple[every_batch.Load, ...] = ()

    @property
    def timeline(self) -> Timeline:
        copies = tuple(record.copies for record in self.ranks)
        return Timeline(tuple(record.passes for record in self.ranks), copies if any(copies) else ())

    @property
    def peak_activation_bytes(self) -> list[int]:
        """Per rank."""
        return [record.peak_activation_bytes for record in self.ranks]

    @property
    def memory(self) -> list[list[tuple[float, float]]]:
        """For each rank, the moments at which its activation bytes change, and what it holds from then on.

        Known is what it holds at the end of every pass. As in the simulation, a pass allocates when it starts and frees when
        it ends.
        """
        return [
            [
                (timed.start if held > before else timed.end, held)
                for timed, held, before in zip(one.passes, one.held, (0, *one.held), strict=False)
            ]
            for one in self.ranks
        ]


class PendingReport:
    """A report that is being gathered.

    Attributes:
        wait: returns the report, once the iteration has ended on all ranks. Call it at any time, more than once, or never.
    """

    def __init__(self, receive: Callable[[], Report]) -> None:
        self.wait: Callable[[], Report] = cache(receive)


class RecordFormat:
    """The records of a program as numbers: peak bytes; start, end, bytes of every pass; message or copy, start, end of every wait
    and of every copy.

    Args:
        program: of the rank that was recorded.
    """

    def __init__(self, program: ops.Program) -> None:
        self._works: tuple[Pass, ...] = tuple(work for one in program if (work := ops.pass_of(one)) is not None)
        # Those that may be waited for: to come, or at the end of the iteration to have gone.
        self._messages = tuple(one.message for one in program if isinstance(one, ops.Wait | ops.Send))
        self._places = {message: float(place) for place, message in enumerate(self._messages)}
        self._copies = sum(isinstance(one, ops.Copy) for one in program)

    @property
    def length(self) -> int:
        """Most numbers that a record can have."""
        return 1 + 3 * (len(self._works) + self._copies + len(self._messages))

    def encode(self, record: Record, length: int) -> list[float]:
        """A record as that many numbers, from which ``decode`` makes an equal one.

        Exact: times are float64 already, and bytes stay far below 2**53.

        Raises:
            ValueError: the record is not of one run of this program.
        """
        if tuple(timed.work for timed in record.passes) != self._works:
            raise ValueError(
                f"the record has {len(record.passes)} passes, which are not the {len(self._works)} of the program in its order: "
                "a report needs one record for each run of a program"
            )
        numbers = [float(record.peak_activation_bytes)]
        for (_, start, end), held in zip(record.passes, record.held, strict=True):
            numbers += start, end, float(held)
        for copy, start, end in record.copies:  # what had nothing to move is not among them
            numbers += self._places[copy], start, end
        numbers += [_NONE] * 3 * (self._copies - len(record.copies))
        for message, start, end in record.waits:
            numbers += self._places[message], start, end
        return numbers + [_NONE] * (length - len(numbers))

    def decode(self, numbers: Sequence[float]) -> Record:
        """The record that ``encode`` was given."""
        peak, rows = numbers[0], [numbers[at : at + 3] for at in range(1, len(numbers), 3)]
        count, copies = len(self._works), self._copies
        passes, others = rows[:count], rows[count:]
        named = [
            [(self._messages[int(at)], start, end) for at, start, end in part if at != _NONE]
            for part in (others[:copies], others[copies:])
        ]
        return Record(
            tuple(Timed(work, start, end) for work, (start, end, _) in zip(self._works, passes, strict=True)),
            tuple(Waited(*one) for one in named[1]),
            tuple(int(held) for _, _, held in passes),
            int(peak),
            tuple(Timed(copy, start, end) for copy, start, end in named[0] if isinstance(copy, Pass)),
        )


def start_gathering(
    record: Record, planned: Planned, formats: Sequence[RecordFormat], group: torch.distributed.ProcessGroup
) -> PendingReport:
    """Send this rank's record and post receives for the others': a collective that does not block.

    Args:
        record: of this rank.
        planned: the recorded iteration.
        formats: of all ranks, for its programs.
        group: the pipeline's; all ranks start gathering at the same place among its collectives.
    """
    length, loads = max(one.length for one in formats), planned.problem.costs.loads
    numbers = formats[group.rank()].encode(record, length)
    device = this_device() if torch.distributed.get_backend(group) == "nccl" else torch.device("cpu")
    with side_stream(device):
        mine = torch.tensor(numbers, dtype=torch.float64, device=device)
        everyone = [torch.empty_like(mine) for _ in formats]
        request = torch.distributed.all_gather(everyone, mine, group=group, async_op=True)

    def receive() -> Report:
        with side_stream(device):
            request.wait()
            rows = [numbers.tolist() for numbers in everyone]
        return Report(tuple(one.decode(row) for one, row in zip(formats, rows, strict=True)), planned.schedule, loads)

    return PendingReport(receive)


def gather_objects(record: Record, name: str, placement: Placement, group: torch.distributed.ProcessGroup) -> PendingReport:
    """The same where no rank knows the others' programs, as under megatron-core's own schedules; waits for all ranks.

    Args:
        name, placement: of the schedule, whose passes are those that the ranks have recorded.
    """
    everyone: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(everyone, record, group=group)
    rows = tuple(tuple(timed.work for timed in one.passes) for one in everyone)
    microbatches = sum(work.kind is Kind.F and work.chunk == 0 for work in rows[0])
    schedule = Schedule(name, placement, microbatches, rows)
    return PendingReport(lambda: Report(tuple(everyone), schedule))
