"""A program: one rank's schedule after lowering, as the operations an executor runs in order.

Tensors between stages are named by the pass that made them, so sender and receiver mean the same thing without counting.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, TypeAlias

from megatron.pipeline.schedule.passes import Pass


class Flow(StrEnum):
    """Which way a tensor travels through the model."""

    ACTIVATION = "activation"  # F's output, to the next stage
    GRADIENT = "gradient"  # B's input gradient, to the previous stage


class Message(NamedTuple):
    """A tensor that one stage makes and its neighbour needs."""

    flow: Flow
    microbatch: int
    stage: int  # the stage that made it

    def __str__(self) -> str:
        return f"{self.flow} of microbatch {self.microbatch} from stage {self.stage}"


class Compute(NamedTuple):
    """Run a pass. Its inputs have been waited for, or were made on this rank."""

    work: Pass


class Send(NamedTuple):
    """Start sending a tensor that this rank has made; ``peer`` is a pipeline rank. Does not block."""

    message: Message
    peer: int


class Receive(NamedTuple):
    """Post the buffer for a tensor that a peer sends. Does not block."""

    message: Message
    peer: int


class Wait(NamedTuple):
    """Block until a tensor that was posted with ``Receive`` is here."""

    message: Message


class Validate(NamedTuple):
    """Go on only once the optimizer step before this iteration stands; if it does not, what was done so far is void.

    Before it stand forwards alone, and every message that is sent or received before it is so on both of its ranks.
    """


Operation: TypeAlias = Compute | Send | Receive | Wait | Validate
Program: TypeAlias = tuple[Operation, ...]
