"""When a message that has been posted starts: the rules that the executor follows, and that its proof replays."""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from megatron.pipeline.schedule.lower.program import Compute, Message, Operation, Program, Receive, Send, Wait

# Where a device cannot say whether a send is over, only wait for it, a Send first waits until no more than these are unfinished
# to the same peer. That holds few tensors.
UNFINISHED_SENDS = 2

# The most passes that a GPU's host has launched and the GPU has not ended. The memory of a message can be used again only once
# the device has come past it, so a host that ran ahead without end would need that of many.
LEAD = 4


class Posting(StrEnum):
    """Way in which the sends and receives between two passes are started."""

    SINGLE = "single"  # one by one, where they are posted: each can be waited for by itself
    BATCHED = "batched"  # all of a direction together, as one NCCL launch, where ``starts_posted`` says so


def starts_posted(operation: Operation) -> bool:
    """Tell whether all that has been posted starts before an operation, where posting is batched.

    It must before a pass, which may take long, and before all that may wait for other ranks: they may need these messages to get
    there. A Send that has to wait for earlier ones starts them as well. At the end of a program everything starts.
    """
    return not isinstance(operation, (Send, Receive))


def message_buffers(program: Program) -> int:
    """The most messages whose memory a rank on a GPU may need at a time: those posted and not yet received, and those received or
    sent around the last ``LEAD`` passes that its host has launched."""
    most = posted = passes = 0
    passed: deque[int] = deque()  # for every message that was received or sent, the passes before that
    for operation in program:
        match operation:
            case Receive():
                posted += 1
            case Wait(Message()):
                posted -= 1
                passed.append(passes)
            case Send():
                passed.append(passes)
            case Compute():
                passes += 1
                while passed and passed[0] < passes - LEAD:
                    passed.popleft()
        most = max(most, posted + len(passed))
    return most
