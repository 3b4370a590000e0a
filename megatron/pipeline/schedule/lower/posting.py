"""When a message that has been posted starts: the rules that the executor follows, and that its proof replays."""

from __future__ import annotations

from enum import StrEnum

from megatron.pipeline.schedule.lower.program import Operation, Receive, Send

# Where a device cannot say whether a send is over, only wait for it, a Send first waits until no more than these are unfinished
# to the same peer. That holds few tensors.
UNFINISHED_SENDS = 2


class Posting(StrEnum):
    """How the sends and receives that stand between two passes are started."""

    SINGLE = "single"  # one by one, where they are posted: each can be waited for by itself
    BATCHED = "batched"  # all of a direction together, as one NCCL launch, where ``starts_posted`` says so


def starts_posted(operation: Operation) -> bool:
    """Whether all that has been posted starts before an operation, where posting is batched.

    It must before a pass, which may take long, and before all that may wait for other ranks: they may need these messages to get
    there. A Send that has to wait for earlier ones starts them as well. At the end of a program everything starts.
    """
    return not isinstance(operation, (Send, Receive))
