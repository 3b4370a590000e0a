"""Loads: what the passes of each microbatch take, where microbatches are of unequal lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import NamedTuple


class Extent(NamedTuple):
    """All that a load follows from: the tokens of a microbatch, and the sum of the squares of its sequences' lengths."""

    tokens: int
    squares: int

    @classmethod
    def of(cls, sequences: Iterable[int], name: str = "a microbatch") -> Extent:
        """Args: sequences: their lengths in tokens.

        Raises:
            ValueError: there is none, a length is not a whole number of at least 1, or a sum has more than 64 bits.
        """
        given = list(sequences)
        whole = [index(length) for length in given if hasattr(length, "__index__") and not isinstance(length, bool)]
        extent = cls(sum(whole), sum(length**2 for length in whole))
        if len(whole) < len(given) or min(whole, default=0) < 1 or extent.squares >= 2**63:
            raise ValueError(
                f"{name} has sequences of {given} tokens: give whole numbers of at least 1, one or more, the squares of which "
                "sum to less than 2^63"
            )
        return extent

    def load(self, tokens: float, attention: float = 0.0) -> Load:
        """The load, by a cost of tokens: linear, and quadratic within each sequence where attention is.

        W, memory and messages are linear. B of attention takes twice its F, and of all else as long as F.

        Args:
            tokens: of the one sequence of the microbatch whose load is 1.
            attention: the share of that microbatch's F that is attention of its queries and keys.
        """
        linear, squares = self.tokens / tokens, self.squares / tokens**2
        forward = (1 - attention) * linear + attention * squares
        return Load(forward, (forward + attention * squares) / (1 + attention), linear, linear, linear)


class Load(NamedTuple):
    """Time and memory of one microbatch, as multiples of the costs of every stage.

    Attributes:
        forward: of the seconds of F and R.
        backward: of those of B.
        weight: of those of W.
        memory: of what its activations hold.
        tokens: of the seconds of its messages, and of the passes of the vocabulary with what these hold.
    """

    forward: float = 1
    backward: float = 1
    weight: float = 1
    memory: float = 1
    tokens: float = 1


def loads_of(microbatches: Sequence[Sequence[int]], tokens: float | None = None, attention: float = 0.0) -> tuple[Load, ...]:
    """The loads of microbatches: see ``Extent.load``.

    Args:
        microbatches: the lengths of the sequences of each, in tokens.
        tokens: of the microbatch whose costs are known; by default the mean of these.
        attention: see ``Extent.load``.

    Raises:
        ValueError: there is no microbatch, a length is not a whole number of at least 1, or a number is out of range.
    """
    extents = [Extent.of(sequences, f"microbatch {number}") for number, sequences in enumerate(microbatches)]
    if not extents:
        raise ValueError("no microbatch: give the lengths of the sequences of each")
    if tokens is None:
        tokens = sum(extent.tokens for extent in extents) / len(extents)
    if not (0 < tokens < float("inf") and 0 <= attention <= 1):
        raise ValueError(
            f"costs of a microbatch of {tokens:g} tokens with a share of {attention:g} for attention: give tokens above 0, "
            "and a share from 0 to 1"
        )
    return tuple(extent.load(tokens, attention) for extent in extents)
