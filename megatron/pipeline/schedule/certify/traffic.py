"""Traffic between ranks, from any schedule: passes, messages posted, and waits, in the order of every rank.

Programs of ours say the same (``of_programs``). A file with communication operations of its own, or Megatron's own schedule,
becomes traffic as it stands, and so may hang.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.lower.lower import messages
from megatron.pipeline.schedule.lower.program import Collective, Compute, Join, Message, Program, Receive, Send, Validate, Wait


class TrafficShape(NamedTuple):
    """The shape of a tensor, which travels before it."""

    of: Message

    def __str__(self) -> str:
        return f"shape of the {self.of}"


Item: TypeAlias = Message | TrafficShape


class Post(NamedTuple):
    """One end of a message: this rank sends it to a peer, or receives it from one."""

    sends: bool
    item: Item
    peer: int

    def __str__(self) -> str:
        return (
            f"Send of the {self.item} to rank {self.peer}" if self.sends else f"Receive of the {self.item} from rank {self.peer}"
        )


class Batch(NamedTuple):
    """Posts that stand next to each other. Only some transports make one group of them: see ``transports.py``."""

    posts: tuple[Post, ...]


class Await(NamedTuple):
    """Wait: what is computed after it needs that a message that this rank has posted (either end), or a collective, is over."""

    item: Item | Collective


class Sync(NamedTuple):
    """The host goes on only after all that stands before this has ended on the device (``torch.cuda.synchronize``)."""


Step: TypeAlias = Compute | Batch | Await | Join | Sync
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
    """Traffic of lowered programs. Sends and receives that nothing stands between are one batch.

    Copies to host memory and the validation of an optimizer step exchange nothing, so they are left out; copies then take no
    time.
    """
    return _traffic(schedule, [grouped(_steps(program)) for program in programs])


def _steps(program: Program) -> Iterator[Step | Post | None]:
    for operation in program:
        match operation:
            case Send(message, peer):
                yield Post(True, message, peer)
            case Receive(message, peer):
                yield Post(False, message, peer)
            case Wait(Message() | Collective() as item):
                yield Await(item)
            case Compute() | Join():
                yield operation
            case Validate():
                yield None


def late(schedule: Schedule) -> Traffic:
    """A schedule with every Receive directly before the pass that needs it, and every Send directly after the pass that makes it.

    It can be made of a schedule whose passes wait for each other in a circle, too; ``lower`` needs one that can finish.

    Raises:
        ValueError: the schedule spreads its vocabulary.
    """
    if schedule.vocabulary:
        raise ValueError(f"{schedule.name} spreads its vocabulary over all ranks, and its passes wait for each other in a circle")
    before: dict[tuple[int, int], list[Post]] = defaultdict(list)
    after: dict[tuple[int, int], list[Post]] = defaultdict(list)
    for message, sender, producer, receiver, consumer in messages(schedule):
        after[sender, producer].append(Post(True, message, receiver))
        before[receiver, consumer].append(Post(False, message, sender))

    def steps(rank: int) -> Iterator[Step | Post]:
        for slot, work in enumerate(schedule.passes[rank]):
            yield from before[rank, slot]
            yield from (Await(post.item) for post in before[rank, slot])
            if not work.kind.is_copy:
                yield Compute(work)
            yield from after[rank, slot]

    return _traffic(schedule, [grouped(steps(rank)) for rank in range(schedule.ranks)])


def grouped(steps: Iterable[Step | Post | None]) -> Row:
    """A row whose posts that nothing, not even a None, stands between are one batch."""
    row: list[Step] = []
    for posts, some in groupby(steps, lambda step: isinstance(step, Post)):
        if posts:
            row.append(Batch(tuple(step for step in some if isinstance(step, Post))))
        else:
            row += [step for step in some if not isinstance(step, Post | None)]
    return tuple(row)


def _traffic(schedule: Schedule, rows: Iterable[Row]) -> Traffic:
    return Traffic(schedule.name, schedule.placement, schedule.microbatches, tuple(rows), schedule.splits)
