"""The unit of work of a schedule: one pass of one microbatch on one chunk."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a pass computes."""

    F = "F"  # forward
    R = "R"  # forward once more, where F kept nothing but its input
    B = "B"  # backward for the input
    W = "W"  # backward for the weights
    BW = "BW"  # both backwards, fused
    S = "S"  # own rows of the output vocabulary: logits and their softmax
    T = "T"  # gradient of own rows of the output vocabulary
    IF = "IF"  # own rows of the input embedding: look-up
    IB = "IB"  # gradient of own rows of the input embedding
    D2H = "D2H"  # what F keeps, copied to host memory
    H2D = "H2D"  # and back to the device

    __hash__ = str.__hash__  # Enum's own is written in Python, and passes are looked up by the hundred thousand

    @property
    def sends_gradient(self) -> bool:
        """Whether the pass produces the gradient that the previous stage waits for."""
        return self in (Kind.B, Kind.BW)

    @property
    def finishes_weights(self) -> bool:
        """Whether the pass adds its microbatch to the weight gradients, and so frees all that F allocated."""
        return self in (Kind.W, Kind.BW)

    @property
    def is_of_vocabulary(self) -> bool:
        """Whether every rank runs it for its shard of the vocabulary, rather than for a stage."""
        return self in VOCABULARY_KINDS

    @property
    def is_copy(self) -> bool:
        """Whether it runs on one of its rank's copy lanes, beside what the rank computes."""
        return self in COPY_KINDS

    @property
    def is_forward(self) -> bool:
        """Whether it belongs to an evaluation too: it changes no gradient."""
        return self in (Kind.F, Kind.S, Kind.IF)


STAGE_KINDS = (Kind.F, Kind.R, Kind.B, Kind.W, Kind.BW)
VOCABULARY_KINDS = (Kind.S, Kind.T, Kind.IF, Kind.IB)
COPY_KINDS = (Kind.D2H, Kind.H2D)


class Vocabulary(StrEnum):
    """How the vocabulary is spread over all ranks: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism"."""

    TWO_BARRIERS = "1"  # the gradient of the last stage's output follows T: algorithm 1
    ONE_BARRIER = "2"  # it follows S, and T can wait: algorithm 2
    INTERLACED = "interlaced"  # as with two barriers, and every rank waits in S and T for all others (nnScaler)


class Offload(StrEnum):
    """How much of the activations goes to host memory: Wan et al., "PipeOffload", which calls these PO-H and PO-F."""

    SELECTIVE = "selective"  # at most half, those that are kept longest
    FULL = "full"  # all that pays


class Pass(NamedTuple):
    """One pass; written ``F0.1``: kind, microbatch, chunk. Passes of the vocabulary belong to the rank, and have chunk 0.

    In a schedule that cuts its microbatches into ``splits`` slices along the sequence, the number counts slices: slice s of
    microbatch i is ``i * splits + s``.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> Pass:
        """Read ``"F0.1"`` back into a pass.

        Raises:
            ValueError: the text is not kind, microbatch, dot, chunk.
        """
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            kinds = ", ".join(Kind)
            raise ValueError(f"{text!r} is not a pass: expected KIND MICROBATCH.CHUNK such as F0.1, with KIND one of {kinds}")
        return cls(Kind(match[1]), int(match[2]), int(match[3]))


_PATTERN = re.compile(rf"({'|'.join(sorted(Kind, key=len, reverse=True))})(\d+)\.(\d+)")
