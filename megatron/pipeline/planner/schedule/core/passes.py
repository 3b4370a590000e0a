"""The unit of work of a schedule: one pass of one microbatch on one chunk."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from megatron.pipeline.planner.schedule.core.kinds import COPY_KINDS, STAGE_KINDS, VOCABULARY_KINDS, Kind, Vocabulary

__all__ = ["COPY_KINDS", "STAGE_KINDS", "VOCABULARY_KINDS", "Kind", "Offload", "Pass", "Vocabulary"]


class Offload(StrEnum):
    """Share of the activations that goes to host memory: Wan et al., "PipeOffload", which calls these PO-H and PO-F."""

    SELECTIVE = "selective"  # at most half, those that are kept longest
    FULL = "full"  # all that pays


class Pass(NamedTuple):
    """One pass; written ``F0.1``: kind, microbatch, chunk. Passes of the vocabulary belong to the rank, and have chunk 0. Passes
    between iterations (RS, OPT, AG) are of a bucket of the chunk, whose number stands in the microbatch's place.

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
            raise ValueError(
                f"{text!r} is not a pass: expected KIND MICROBATCH.CHUNK such as F0.1, with KIND one of {', '.join(Kind)}"
            )
        return cls(_NAMED[match[1]], int(match[2]), int(match[3]))


Order = tuple[tuple[Pass, ...], ...]  # every rank's passes, in the order in which it runs them


_NAMED = {str(kind): kind for kind in Kind}
_PATTERN = re.compile(rf"({'|'.join(sorted(Kind, key=len, reverse=True))})(\d+)\.(\d+)")
