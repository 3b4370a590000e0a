"""Traffic between ranks, from any schedule: passes, messages posted, and waits, in the order of every rank.

Programs of ours are traffic as they stand. A file with communication operations of its own becomes traffic as it
stands, too, and so may hang. In traffic a rank may also wait for what it sends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from megatron.pipeline.planner.schedule.core.kinds import Flow
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.program import (
    UNFINISHED_SENDS,
    Compute,
    Join,
    Message,
    Operation,
    Program,
    Send,
    Wait,
)


class Start(NamedTuple):
    """Start what has been posted: what is posted next belongs to no group with it."""


class Sync(NamedTuple):
    """Have the host go on only after all that stands before this has ended on the device (``torch.cuda.synchronize``)."""


Step: TypeAlias = Operation | Start | Sync
Row: TypeAlias = tuple[Step, ...]


@dataclass(frozen=True)
class Traffic:
    """The rows of all ranks. A rank posts an item once.

    Attributes:
        name: of the schedule.
        placement: which stage each (rank, chunk) holds.
        microbatches, splits: as of a schedule.
    """

    name: str
    placement: Placement
    microbatches: int
    rows: tuple[Row, ...]
    splits: int = 1

    @property
    def ranks(self) -> int:
        return len(self.rows)


def of_programs(schedule: Schedule, programs: Sequence[Program]) -> Traffic:
    """Traffic of lowered programs. Copies to host memory and the validation of an optimizer step exchange nothing; copies take no
    time.
    """
    return Traffic(schedule.name, schedule.placement, schedule.microbatches, tuple(programs), schedule.splits)


def with_waits_of_batches(traffic: Traffic) -> Traffic:
    """Traffic of programs with all that the runtime waits for where messages start in batches.

    A Join blocks until all ranks reach theirs, a backward until its microbatch's activation has been sent, and a Send until
    earlier ones have (``UNFINISHED_SENDS``).
    """
    rows = (tuple(_waiting(row, traffic.placement.stages[rank])) for rank, row in enumerate(traffic.rows))
    return Traffic(traffic.name, traffic.placement, traffic.microbatches, tuple(rows), traffic.splits)


def _waiting(row: Row, stages: Sequence[int]) -> Iterator[Step]:
    sent: set[Message] = set()
    unfinished: dict[tuple[int, Flow], deque[Message]] = defaultdict(deque)
    for step in row:
        if type(step) is Compute:
            kind, microbatch, chunk = step.work
            if kind.sends_gradient and (activation := Message(Flow.ACTIVATION, microbatch, stages[chunk])) in sent:
                yield Wait(activation)
        yield step
        if type(step) is Send:
            message, peer = step
            sent.add(message)
            before = unfinished[peer, message.flow]
            before.append(message)
            if len(before) > UNFINISHED_SENDS:
                yield Wait(before.popleft())
        elif type(step) is Join:
            yield Wait(step.collective)
