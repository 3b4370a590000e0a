"""Kind of layer in place of attention, in numbers that work, memory and time are counted with."""

from __future__ import annotations

from typing import NamedTuple


class Mixer(NamedTuple):
    """For each token, of all ranks that share a layer by its heads.

    Attributes:
        projected, mixed: widths of what its first linear makes of hidden states, and of what its last one reads.
        kept: numbers that F keeps for B beside those, which W needs too.
        parameters: those that are no matrices of its two linears.
        forward, backward: operations of F and B that have no weights.
        moved_forward, moved_backward: numbers that F and B read and write outside of products.
    """

    projected: float = 0.0
    mixed: float = 0.0
    kept: float = 0.0
    parameters: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    moved_forward: float = 0.0
    moved_backward: float = 0.0
