"""A program: one rank's schedule after lowering, as the operations an executor runs in order, and when what they post starts.

Tensors between stages are named by the pass that made them, so sender and receiver mean the same thing without counting.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, TypeAlias

from megatron.pipeline.planner.schedule.core.kinds import Exchange, Flow
from megatron.pipeline.planner.schedule.core.passes import Pass

# Where a device cannot say whether a send is over, only wait for it, a Send first waits until no more than these are unfinished
# to the same peer. That holds few tensors.
UNFINISHED_SENDS = 2


class Posting(StrEnum):
    """Way in which the sends and receives between two passes are started."""

    SINGLE = "single"  # one by one, where they are posted: each can be waited for by itself
    BATCHED = "batched"  # all of a direction together, as one NCCL launch, where ``starts_posted`` says so


class Message(NamedTuple):
    """A tensor that one stage makes and its neighbour needs."""

    flow: Flow
    microbatch: int
    stage: int  # the stage that made it

    def __str__(self) -> str:
        return f"{self.flow} of microbatch {self.microbatch} from stage {self.stage}"


class Collective(NamedTuple):
    """An exchange of one microbatch: this rank's part in it, and what it receives."""

    exchange: Exchange
    microbatch: int

    def __str__(self) -> str:
        return f"{self.exchange} of microbatch {self.microbatch} among all ranks"


class Compute(NamedTuple):
    """Run a pass. Its inputs have been waited for, or were made on this rank.

    With ``braided`` that pass, the next one, runs as one with it; its own ``Compute`` follows, and has nothing left to do.
    """

    work: Pass
    braided: Pass | None = None

    def __repr__(self) -> str:
        return f"Compute(work={self.work!r}{f', braided={self.braided!r}' if self.braided else ''})"


class Send(NamedTuple):
    """Start sending a tensor that this rank has made; ``peer`` is a pipeline rank. Does not block."""

    message: Message
    peer: int


class Receive(NamedTuple):
    """Post the buffer for a tensor that a peer sends. Does not block."""

    message: Message
    peer: int


class Join(NamedTuple):
    """Start this rank's part in a collective; all ranks join all of them in the same order.

    Does not block, except where the part has yet to be made from another collective, and the device cannot do so by itself.
    """

    collective: Collective


class Copy(NamedTuple):
    """Start a pass on its lane, such as a copy to host memory (D2H) of what the pass before it keeps, or back (H2D) into device
    memory that is allocated here. Does not block."""

    work: Pass


class Wait(NamedTuple):
    """Block until a tensor that was posted with ``Receive`` is here, a collective that was joined is over, or a pass that was
    started on a lane has ended: what a copy took to host memory is then freed on the device."""

    message: Message | Collective | Pass


class Validate(NamedTuple):
    """Go on only once the optimizer step before this iteration stands; if it does not, what was done so far is void.

    Before it stand forwards and copies alone, and what is sent, received or joined before it is so on all of its ranks.
    """


def pass_of(operation: Operation) -> Pass | None:
    """The pass of the schedule that an operation stands for, if any: it computes it, or has the place of a pass on a lane."""
    if isinstance(operation, Compute):
        return operation.work
    if isinstance(operation, (Copy, Wait)) and isinstance(work := operation[0], Pass):
        return work if work.kind.row.starts is isinstance(operation, Copy) else None
    return None


Operation: TypeAlias = Compute | Send | Receive | Join | Copy | Wait | Validate
Program: TypeAlias = tuple[Operation, ...]


def starts_posted(operation: Operation) -> bool:
    """Tell whether all that has been posted starts before an operation, where posting is batched.

    It must before a pass, which may take long, and before all that may wait for other ranks: they may need these messages to get
    there. A Send that has to wait for earlier ones starts them as well. At the end of a program everything starts.
    """
    return not isinstance(operation, (Send, Receive))


def describe(operation: Operation | None) -> str:
    """An operation in the words of messages."""
    match operation:
        case Send(message, peer):
            return f"Send of the {message} to rank {peer}"
        case Receive(message, peer):
            return f"Receive of the {message} from rank {peer}"
        case Join(collective):
            return f"Join of the {collective}"
        case Copy(work) | Wait(Pass() as work):
            return f"{type(operation).__name__} {work}"
        case Wait(awaited):
            return f"Wait for the {awaited}"
        case _:
            return str(operation)
