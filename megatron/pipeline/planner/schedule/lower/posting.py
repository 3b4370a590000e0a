"""Passes that a GPU's host launches ahead of it, and the messages whose memory that takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.lower.program import Compute, Message, Program, Receive, Send, Wait

# The most passes that a GPU's host has launched and the GPU has not ended, unless they are short: see ``leads``. The memory of a
# message can be used again only once the device has come past it, so a host that ran ahead without end would need that of many.
LEAD = 4


def leads(program: Program, seconds: Mapping[Pass, float]) -> tuple[int, ...]:
    """For every pass of a program, how many passes directly before it the GPU may have left to end when its host launches it.

    They are ``LEAD - 1``, and more where these are planned to take less than a forward, in which the host can launch any pass:
    those of the vocabulary end before the host has launched the next forward.

    Args:
        seconds: how long each pass is planned to take, in any unit.
    """
    passes = [operation.work for operation in program if isinstance(operation, Compute)]
    enough = max((seconds[work] for work in passes if work.kind is Kind.F), default=0.0)
    found, first, left = [], 0, 0.0
    for number, work in enumerate(passes):
        while number - first >= LEAD and left - seconds[passes[first]] >= enough:
            left -= seconds[passes[first]]
            first += 1
        found.append(number - first)
        left += seconds[work]
    return tuple(found)


def message_buffers(program: Program, lead: Sequence[int]) -> int:
    """The most messages whose memory a rank on a GPU may need at a time: those posted and not yet received, and those received or
    sent around the last passes that its host has launched, as far ahead as ``leads`` lets it be."""
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
                while passed and passed[0] < passes - lead[passes]:
                    passed.popleft()
                passes += 1
        most = max(most, posted + len(passed))
    return most
