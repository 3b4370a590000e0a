"""The unit of work of a schedule: one pass of one microbatch on one chunk."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from megatron.pipeline.schedule.core.kinds import COPY_KINDS, STAGE_KINDS, VOCABULARY_KINDS, AnyKind, Kind, Vocabulary

__all__ = ["COPY_KINDS", "STAGE_KINDS", "VOCABULARY_KINDS", "Kind", "Offload", "Pass", "Vocabulary"]


class Offload(StrEnum):
    """How much of the activations goes to host memory: Wan et al., "PipeOffload", which calls these PO-H and PO-F."""

    SELECTIVE = "selective"  # at most half, those that are kept longest
    FULL = "full"  # all that pays


class Pass(NamedTuple):
    """One pass; written ``F0.1``: kind, microbatch, chunk. Passes of the vocabulary belong to the rank, and have chunk 0.

    A pass that a schedule runs in several parts, with others between them, has a pass for each part; ``F0.1:2`` is part 2.

    In a schedule that cuts its microbatches into ``splits`` slices along the sequence, the number counts slices: slice s of
    microbatch i is ``i * splits + s``.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    part: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}" + (f":{self.part}" if self.part else "")

    @classmethod
    def parse(cls, text: str, kinds: Iterable[AnyKind] = Kind) -> Pass:
        """Read ``"F0.1"`` back into a pass.

        Args:
            kinds: those that the text can name.

        Raises:
            ValueError: the text is not kind, microbatch, dot, chunk.
        """
        pattern, named = _pattern(tuple(kinds))
        match = pattern.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"{text!r} is not a pass: expected KIND MICROBATCH.CHUNK such as F0.1, with KIND one of {', '.join(named)}"
            )
        return cls(named[match[1]], int(match[2]), int(match[3]), int(match[4] or 0))


Order = tuple[tuple[Pass, ...], ...]  # every rank's passes, in the order in which it runs them


@lru_cache(maxsize=8)
def _pattern(kinds: tuple[Kind, ...]) -> tuple[re.Pattern[str], dict[str, Kind]]:
    names = "|".join(sorted(kinds, key=len, reverse=True))
    return re.compile(rf"({names})(\d+)\.(\d+)(?::([1-9]\d*))?"), {str(kind): kind for kind in kinds}
