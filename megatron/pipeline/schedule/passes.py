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

    __hash__ = str.__hash__  # Enum's own is written in Python, and passes are looked up by the hundred thousand

    @property
    def sends_gradient(self) -> bool:
        """Whether the pass produces the gradient that the previous stage waits for."""
        return self in (Kind.B, Kind.BW)

    @property
    def finishes_weights(self) -> bool:
        """Whether the pass adds its microbatch to the weight gradients, and so frees all that F allocated."""
        return self in (Kind.W, Kind.BW)


class Pass(NamedTuple):
    """One pass; written ``F0.1``: kind, microbatch, chunk.

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
